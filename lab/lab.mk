# The kernel lab: `make lab`. Needs a Debian host; nothing else depends on it.
.PHONY: lab lab-quick lab-build lab-check lab-clean

# Everything, on the plugin that ships: the better part of an hour.
lab: dist ffi-programs bench-build
	cargo test --workspace $(TEST_FEATURES) --test lab -- --test-threads=1 --nocapture --include-ignored

# The list that CI runs.
lab-quick: dist ffi-programs bench-build
	cargo test --workspace $(TEST_FEATURES) --test lab -- --test-threads=1 --nocapture

lab-build:
	lab/build stable

# The guest's RDMA devices alone, without the plugin.
lab-check:
	lab/check

lab-clean:
	rm -rf lab/out
