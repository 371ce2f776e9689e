# The software RNIC: `make -f softrnic/softrnic.mk` from the top of the tree, or included by the top Makefile.
PROFILE ?= release

.PHONY: softrnic
softrnic:
	softrnic/link.sh $(PROFILE) dist/softrnic
