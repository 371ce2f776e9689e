//! A software RNIC behind the libibverbs C ABI.
