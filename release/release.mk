# The release. The top Makefile includes this file; `dist` and `bench-build` build what goes into it.
#
#   make release                         dist/release/pinrail-VERSION-ARCH-linux.tar.gz and its checksum
#   make install PREFIX=… DESTDIR=…      the same files below PREFIX (/usr/local)
#   make uninstall PREFIX=… DESTDIR=…    removes exactly what was installed there

PREFIX ?= /usr/local
RELEASE := $(DIST)/release

.PHONY: release release-stage install uninstall

release-stage: dist bench-build
	release/stage $(DIST) $(BENCH) $(RELEASE)

release: release-stage
	release/pack $(RELEASE)

# The Makefile that goes along does it, so that a tarball and a checkout install alike.
install: release-stage
	@$(MAKE) --no-print-directory -C $(RELEASE)/$$(cat $(RELEASE)/name) install

uninstall:
	@$(MAKE) --no-print-directory -f release/Makefile uninstall
