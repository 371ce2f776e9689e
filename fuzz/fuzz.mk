# Fuzzing on a stable compiler: `make fuzz SECONDS=600`. Seeds and findings stay in fuzz/corpus and fuzz/artifacts.
#
# The instrumentation is for the code under test alone. Build scripts and their dependencies are not touched by it,
# because a target is named, and are the ones that the tests use: one target folder. The targets that make connections
# do so over softrnic as it is in dist/.
.PHONY: fuzz fuzz-build
SECONDS ?= 60
FUZZ_TARGETS ?= handshake credit settings plan completions tree calls
FUZZ_HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ_FLAGS := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Copt-level=1 --cfg fuzzing
FUZZ_PROVIDER := target/fuzz/libprovider.so

fuzz-build: deps $(FUZZ_PROVIDER)
	RUSTFLAGS="$(FUZZ_FLAGS)" cargo build --locked --manifest-path fuzz/Cargo.toml --target $(FUZZ_HOST) --target-dir target

$(FUZZ_PROVIDER): fuzz/provider.c fuzz/provider.map dist/softrnic/libibverbs.so.1
	@mkdir -p $(dir $@)
	$(CC) -std=gnu11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -shared -fPIC $< -o $@ -Wl,--version-script,fuzz/provider.map \
	  -Wl,-soname,libprovider.so -Wl,--no-as-needed -Wl,-rpath,'$$ORIGIN/../../dist/softrnic' dist/softrnic/libibverbs.so.1 -ldl

dist/softrnic/libibverbs.so.1:
	@$(MAKE) --no-print-directory softrnic

# Reports of the doctor are its output; nobody reads them here.
fuzz: fuzz-build
	@mkdir -p fuzz/artifacts; for name in $(FUZZ_TARGETS); do \
	  mkdir -p fuzz/corpus/$$name; echo "fuzzing $$name for $(SECONDS) s"; \
	  target/$(FUZZ_HOST)/debug/$$name -max_total_time=$(SECONDS) -max_len=16384 -rss_limit_mb=2048 -timeout=100 -verbosity=0 \
	    $$([ $$name = tree ] && echo -close_fd_mask=1) \
	    -artifact_prefix=fuzz/artifacts/$$name- fuzz/corpus/$$name || exit 1; \
	done
