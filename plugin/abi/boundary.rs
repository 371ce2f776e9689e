//! The one way from C into the plugin: no panic leaves, every error becomes a result code, and is logged once.

use super::types::{
    INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, NcclResult, REMOTE_ERROR, SUCCESS,
    SYSTEM_ERROR,
};
use crate::error::{Blame, Error, Fault};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result code for an error.
pub fn code(error: &Error) -> NcclResult {
    match error.blame() {
        Blame::System => SYSTEM_ERROR,
        Blame::Remote => REMOTE_ERROR,
        Blame::Argument => INVALID_ARGUMENT,
        Blame::Usage => INVALID_USAGE,
        Blame::Internal => INTERNAL_ERROR,
    }
}

/// Runs one exported call.
///
/// State behind a panic stays as it was: communicators have no lock to poison, and a call that panicked half-way has
/// left a request unfinished at worst, which its error tells the caller.
#[inline(always)]
pub fn enter(call: &'static str, body: impl FnOnce() -> Result<(), Fault>) -> NcclResult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(fault)) => failed(call, &fault),
        Err(_) => panicked(call),
    }
}

/// Runs one call of the C API, which answers with 0 or an errno value.
pub fn enter_api<T: Default>(
    call: &'static str,
    body: impl FnOnce() -> Result<T, Error>,
) -> (c_int, T) {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => (0, value),
        Ok(Err(error)) => {
            failed(call, &error);
            (errno(&error), T::default())
        }
        Err(_) => {
            panicked(call);
            (libc::EIO, T::default())
        }
    }
}

/// The errno value for an error; never 0.
fn errno(error: &Error) -> c_int {
    error.errno().filter(|errno| *errno > 0).unwrap_or(match error.blame() {
        Blame::Argument => libc::EINVAL,
        Blame::Usage => libc::EPERM,
        Blame::System | Blame::Remote | Blame::Internal => libc::EIO,
    })
}

#[cold]
#[inline(never)]
fn failed(call: &'static str, error: &Error) -> NcclResult {
    let code = code(error);
    if !error.is_reported() {
        // The logger is C code too: a panic while formatting must not leave either.
        let _ = catch_unwind(AssertUnwindSafe(|| tracing::warn!("{call}: {error}")));
    }
    code
}

#[cold]
#[inline(never)]
fn panicked(call: &'static str) -> NcclResult {
    let _ =
        catch_unwind(|| tracing::warn!("{call}: a bug in the plugin (panic); please report it"));
    INTERNAL_ERROR
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error() {
        assert_eq!(enter("test", || panic!("on purpose")), INTERNAL_ERROR);
    }

    #[test]
    fn the_c_api_answers_with_errno_values() {
        assert_eq!(enter_api("test", || Ok(5)), (0, 5));
        let fails = |error: Error| enter_api("test", || Err::<u32, _>(error));
        assert_eq!(fails(Error::argument("")), (libc::EINVAL, 0));
        assert_eq!(fails(Error::usage("")), (libc::EPERM, 0));
        assert_eq!(fails(Error::system("")), (libc::EIO, 0));
        assert_eq!(fails(Error::verb("ibv_reg_mr", "mlx5_0", libc::ENOMEM)), (libc::ENOMEM, 0));
        assert_eq!(fails(Error::system("").with_errno(0)), (libc::EIO, 0), "never a success");
        assert_eq!(enter_api::<u32>("test", || panic!("on purpose")), (libc::EIO, 0));
    }

    #[test]
    fn every_blame_has_its_own_code() {
        let all = [Blame::System, Blame::Remote, Blame::Argument, Blame::Usage, Blame::Internal];
        let codes: std::collections::BTreeSet<_> = all.map(|b| code(&Error::new(b, ""))).into();
        assert_eq!(codes.len(), all.len());
        assert!(!codes.contains(&SUCCESS));
    }
}
