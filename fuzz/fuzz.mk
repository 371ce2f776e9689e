# Fuzzing on a stable compiler: `make fuzz SECONDS=600`. Seeds and findings stay in fuzz/corpus and fuzz/artifacts.
#
# The instrumentation is for the code under test alone. Build scripts and their dependencies are not touched by it,
# because a target is named, and are the ones that the tests use: one target folder.
.PHONY: fuzz fuzz-build
SECONDS ?= 60
FUZZ_TARGETS := handshake credit settings plan
FUZZ_HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ_FLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Copt-level=1 --cfg fuzzing

fuzz-build: deps
	RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --locked --manifest-path fuzz/Cargo.toml --target $(FUZZ_HOST) --target-dir target

fuzz: fuzz-build
	@mkdir -p fuzz/artifacts; for name in $(FUZZ_TARGETS); do \
	  mkdir -p fuzz/corpus/$$name; echo "fuzzing $$name for $(SECONDS) s"; \
	  target/$(FUZZ_HOST)/debug/$$name -max_total_time=$(SECONDS) -max_len=16384 -rss_limit_mb=2048 -verbosity=0 \
	    -artifact_prefix=fuzz/artifacts/$$name- fuzz/corpus/$$name || exit 1; \
	done
