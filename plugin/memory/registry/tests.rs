//! Tests of the registry; see the parent module.
