# pinrail: the commands. `make` builds, `make bench` runs the main job, `make test` runs every check.

PROFILE ?= release
DIST := dist
TARGET := target/$(PROFILE)
# rdma-sys fails with libclang 16 and later. Looked up for every command and not once, because `deps` may just have
# installed it; the last name is for the error message where there is none.
LLVM = $(firstword $(shell ls -d /usr/lib/llvm-14/lib /usr/lib/llvm-15/lib /usr/lib64/llvm14/lib /usr/lib64/llvm15/lib \
  2>/dev/null) /usr/lib/llvm-14/lib)
export LIBCLANG_PATH ?= $(LLVM)
PACKAGES := libibverbs-dev librdmacm-dev libclang-14-dev pkg-config ibverbs-utils perftest valgrind g++ binutils libjemalloc2 iproute2

.PHONY: all deps dist test lint loom header clean

all: dist

include bench/bench.mk
include softrnic/softrnic.mk
include ffi-tests/ffi.mk
include demo/demo.mk
include lab/lab.mk
include fuzz/fuzz.mk
include release/release.mk

# Installs what is missing, or says exactly what to run.
deps:
	@missing=""; for p in $(PACKAGES); do \
	  dpkg-query -W -f='$${db:Status-Status}' $$p 2>/dev/null | grep -q '^installed' || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else \
	    echo "missing packages; please run: sudo apt-get install -y$$missing" >&2; exit 1; fi; \
	  echo "installing$$missing"; $$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	fi

# The plugin under the name NCCL looks for, the software RNIC, and the `pinrail` command.
dist: deps products softrnic

# In one call of cargo: apart, each would have the other's dependencies built anew, because their features differ.
.PHONY: products
products:
	cargo build --profile $(if $(filter release,$(PROFILE)),release,dev) -p pinrail -p pinrail-cli
	@mkdir -p $(DIST)
	@cp $(TARGET)/libnccl_net_pinrail.so $(DIST)/libnccl-net-pinrail.so.new
	@mv $(DIST)/libnccl-net-pinrail.so.new $(DIST)/libnccl-net-pinrail.so
	@cp $(TARGET)/pinrail $(DIST)/pinrail.new
	@mv $(DIST)/pinrail.new $(DIST)/pinrail

# Refreshes include/pinrail.h from plugin/capi.rs.
header: deps
	UPDATE=1 cargo test --test header

# The tests that need the entry point which panics find it in the library that `cargo test` builds for itself. dist/ is
# built in another profile and without the feature, which a test checks on the file.
TEST_FEATURES := --features pinrail/provoke-panic

# Formatting first: it needs nothing built.
lint: deps
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets $(TEST_FEATURES) -- -D warnings
	cargo clippy --workspace --test lab $(TEST_FEATURES) -- -D warnings

# Every check but the kernel lab (`make lab`), cheapest first. Two profiles are built: release, which ships, and dev for
# lint and tests.
test: lint
	@$(MAKE) --no-print-directory dist ffi-programs bench-build
	@$(MAKE) --no-print-directory fuzz SECONDS=5
	cargo test --workspace $(TEST_FEATURES)

# The model checks alone; `test` includes them.
loom:
	cargo test -p pinrail-loom

clean: lab-clean
	cargo clean
	rm -rf $(DIST)
