# Builds the C test programs into target/ffi-tests: make -f ffi-tests/ffi.mk (from the repository's root).
#
# The programs find the plugin and the software RNIC in dist/, or where FFI_PLUGIN and FFI_SOFTRNIC say.
# tests/ffi.rs runs them; `target/ffi-tests/PROGRAM --list` and `target/ffi-tests/PROGRAM CASE vN` run one by hand.

FFI_DIR := $(dir $(lastword $(MAKEFILE_LIST)))
FFI_OUT ?= $(FFI_DIR)../target/ffi-tests
FFI_CFLAGS := -std=gnu11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -Wstrict-prototypes -Wmissing-prototypes \
	-Wshadow -fno-omit-frame-pointer -pthread

# For `make asan`: what instruments the programs, and what they are linked with then.
FFI_INSTRUMENT ?=
FFI_RUNTIME ?=

FFI_SHARED := harness payload observe net pair softrnic held forked records host traffic mill quiet
# A CUDA driver that programs load, and a library of mlx5 devices.
FFI_CUDA := $(FFI_OUT)/libcuda.so.1
FFI_MLX5 := $(FFI_OUT)/libmlx5.so.1
FFI_HEADERS := $(wildcard $(FFI_DIR)*.h) $(FFI_DIR)../include/pinrail.h
FFI_PROGRAMS := $(filter-out $(FFI_SHARED) fakecuda fakemlx5,$(basename $(notdir $(wildcard $(FFI_DIR)*.c))))
FFI_BINARIES := $(addprefix $(FFI_OUT)/,$(FFI_PROGRAMS))
FFI_SHARED_OBJECTS := $(addprefix $(FFI_OUT)/,$(addsuffix .o,$(FFI_SHARED)))

.PHONY: ffi-programs ffi-list
ffi-programs: $(FFI_BINARIES) $(FFI_CUDA) $(FFI_MLX5)

# The names of the programs, for tests/ffi.rs.
ffi-list:
	@echo $(sort $(FFI_PROGRAMS))

$(FFI_OUT)/%.o: $(FFI_DIR)%.c $(FFI_HEADERS) $(FFI_DIR)ffi.mk
	@mkdir -p $(FFI_OUT)
	$(CC) $(FFI_CFLAGS) $(FFI_INSTRUMENT) -c $< -o $@

$(FFI_OUT)/%: $(FFI_OUT)/%.o $(FFI_SHARED_OBJECTS)
	$(CC) $(FFI_CFLAGS) $^ -o $@ $(FFI_RUNTIME) -ldl

$(FFI_CUDA): $(FFI_DIR)fakecuda.c $(FFI_HEADERS) $(FFI_DIR)ffi.mk
	@mkdir -p $(FFI_OUT)
	$(CC) $(FFI_CFLAGS) -shared -fPIC -Wl,-soname,libcuda.so.1 $< -o $@ -ldl

$(FFI_MLX5): $(FFI_DIR)fakemlx5.c $(FFI_DIR)fakemlx5.map $(FFI_DIR)ffi.mk
	@mkdir -p $(FFI_OUT)
	$(CC) $(FFI_CFLAGS) -shared -fPIC -Wl,-soname,libmlx5.so.1 -Wl,--version-script,$(FFI_DIR)fakemlx5.map $< -o $@

.PRECIOUS: $(FFI_OUT)/%.o

# Every case of one version of the table under valgrind, and under AddressSanitizer and UBSan; see ffi-tests/under.
# PROGRAMS="closing bounce" picks some.
.PHONY: valgrind asan asan-build
PROGRAMS ?=

valgrind: dist ffi-programs
	ffi-tests/under valgrind $(PROGRAMS)

# The plugin is instrumented, and so are the programs; the standard library and softrnic are not, but what they allocate
# and copy is watched. The compiler is the stable one, which ships the runtime and takes the option only when told that
# it may. The runtime of the two compilers is one: rustc's.
ASAN_HOST = $(shell rustc -vV | sed -n 's/^host: //p')
ASAN_RUNTIME = $(wildcard $(shell rustc --print sysroot)/lib/rustlib/$(ASAN_HOST)/lib/librustc*_rt.asan.a)

asan-build: deps softrnic
	@test -n "$(ASAN_RUNTIME)" || { echo "the toolchain of $$(rustc --version) has no runtime for AddressSanitizer on \
	  $(ASAN_HOST): use one of rustup's for x86-64 Linux" >&2; exit 1; }
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cforce-frame-pointers=yes -Copt-level=1" \
	  cargo build --locked -p pinrail --lib --target $(ASAN_HOST) --target-dir target/asan
	@mkdir -p target/ffi-asan
	@cp target/asan/$(ASAN_HOST)/debug/libnccl_net_pinrail.so target/ffi-asan/libnccl-net-pinrail.so
	$(MAKE) --no-print-directory -s -f ffi-tests/ffi.mk FFI_OUT=target/ffi-asan \
	  FFI_INSTRUMENT="-fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	  FFI_RUNTIME="-Wl,--whole-archive $(ASAN_RUNTIME) -Wl,--no-whole-archive -Wl,--export-dynamic -lrt -lm"

asan: asan-build
	ffi-tests/under asan $(PROGRAMS)
