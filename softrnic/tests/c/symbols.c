/* Looks names up by version node in the library given as argv[1], as NCCL does; input lines: NODE NAME. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    char node[64], name[128];
    int missing = 0;
    void *lib = dlopen(argc > 1 ? argv[1] : "libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        printf("dlopen: %s\n", dlerror());
        return 2;
    }
    while (scanf("%63s %127s", node, name) == 2)
        if (!dlvsym(lib, name, node)) {
            printf("missing %s@%s\n", name, node);
            missing = 1;
        }
    return missing;
}
