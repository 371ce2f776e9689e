# Measurements. The top-level Makefile includes this file; `dist` there builds what is measured.
#
#   make bench       two processes on this machine: checked, then timed beside perftest (BENCH_ARGS adds options)
#   make bench-cpu   instructions, posts and memory per operation, against bench/record/cpu.json
#                    (CPU_ARGS=--update rewrites the record, CPU_ARGS=--enforce fails over budget)
#   make bench-test  the tests of the bench; they need dist/
BENCH := target/release/pinrail-bench
BENCH_PACKAGES := libibverbs-dev librdmacm-dev libclang-14-dev pkg-config ibverbs-utils perftest
CPU_PACKAGES := libibverbs-dev librdmacm-dev libclang-14-dev pkg-config valgrind

.PHONY: bench bench-cpu bench-test bench-build bench-packages cpu-packages

bench-packages:
	@bench/packages.sh $(BENCH_PACKAGES)

cpu-packages:
	@bench/packages.sh $(CPU_PACKAGES)

# After the packages, also under make -j: the build needs their headers.
bench-build: | bench-packages
	cargo build --release -q -p pinrail-bench

bench: bench-packages dist bench-build
	$(BENCH) --perftest $(BENCH_ARGS)

bench-cpu: cpu-packages dist bench-build
	$(BENCH) cpu $(CPU_ARGS)

bench-test: cpu-packages dist
	cargo test -p pinrail-bench
