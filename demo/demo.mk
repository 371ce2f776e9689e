# Demonstrations. The top-level Makefile includes this file; `dist` there builds what they show.
#
#   make demo-fork   what registering 4 bytes does to forked children, and that what pinrail registers does it to nobody
#
# The one with the plugin uses the client and the checks of ffi-tests; ffi.mk has its flags and objects.
DEMO_DIR := $(dir $(lastword $(MAKEFILE_LIST)))
DEMO_OUT ?= $(DEMO_DIR)../target/demo
DEMO_FORK := $(addprefix $(DEMO_OUT)/,page library region plugin)
ifndef FFI_DIR
include $(DEMO_DIR)../ffi-tests/ffi.mk
endif

.PHONY: demo-fork demo-programs
demo-fork: dist demo-programs
	@demo/fork/run

demo-programs: $(DEMO_FORK)

$(DEMO_OUT)/plugin: $(FFI_SHARED_OBJECTS)
$(DEMO_FORK): $(DEMO_OUT)/%: $(DEMO_DIR)fork/%.c $(DEMO_DIR)fork/table.c $(DEMO_DIR)fork/table.h $(DEMO_DIR)demo.mk $(FFI_HEADERS)
	@mkdir -p $(DEMO_OUT)
	$(CC) $(FFI_CFLAGS) -I $(FFI_DIR) $(filter %.c %.o,$^) -o $@ -ldl
