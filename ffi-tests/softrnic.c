/* The software RNIC's own calls; see softrnic.h. */
#include "softrnic.h"
