# The kernel lab: `make lab`. Needs a Debian host; nothing else depends on it.
.PHONY: lab lab-build lab-check lab-clean

# The list that CI runs, on the plugin that ships.
lab: dist ffi-programs bench-build
	cargo test --workspace $(TEST_FEATURES) --test lab -- --test-threads=1 --nocapture

lab-build:
	lab/build stable

# The guest's RDMA devices alone, without the plugin.
lab-check:
	lab/check

lab-clean:
	rm -rf lab/out
