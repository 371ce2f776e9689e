# Measurements. The top-level Makefile includes this file; `deps` and `dist` there install and build what they need.
#
#   make bench       two processes on this machine: checked, then timed beside perftest (BENCH_ARGS adds options)
#                    BOUNCE=send|recv|both: also with buffers that cannot be pinned, and the ratio to the others
#   make bench-cpu   instructions, posts and memory per operation, against bench/record/cpu.json
#                    (CPU_ARGS=--update rewrites the record, CPU_ARGS=--enforce fails over budget)
#   make bench-register  time per registration for up to 100,000 distinct ranges (printed, not judged)
#   make bench-test  the tests of the bench
BENCH := target/release/pinrail-bench

.PHONY: bench bench-cpu bench-register bench-test bench-build

bench-build: deps
	cargo build --release -q -p pinrail-bench

bench: dist bench-build
	$(BENCH) --perftest $(if $(BOUNCE),--bounce $(BOUNCE)) $(BENCH_ARGS)

bench-cpu: dist bench-build
	$(BENCH) cpu $(CPU_ARGS)

bench-register: dist bench-build
	$(BENCH) register $(REGISTER_ARGS)

bench-test: dist
	cargo test -p pinrail-bench
