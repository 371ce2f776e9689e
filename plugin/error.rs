//! One error type for the whole plugin.
//!
//! An error carries the operation, the object and the operating system's reason, and a [`Blame`] that says what the
//! caller may conclude. It is turned into a result code and logged in one place, the ABI boundary.

use crate::host::descriptors;
use std::fmt;
use std::io;

/// Result of everything that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Who or what is at fault; decides the result code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Blame {
    /// The operating system, a library or a device on this host.
    System,
    /// The peer, or the path to it.
    Remote,
    /// An argument of this call.
    Argument,
    /// A call that the state of the object does not allow.
    Usage,
    /// A broken invariant of the plugin itself.
    Internal,
}

/// An error with everything needed to act on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    blame: Blame,
    errno: Option<i32>,
    verb: Option<&'static str>,
    text: String,
    reported: bool,
}

/// An error on the data path, where the success case must stay small.
pub type Fault = Box<Error>;

impl Error {
    /// An error with the given blame and text.
    pub fn new(blame: Blame, text: impl Into<String>) -> Self {
        Self { blame, errno: None, verb: None, text: text.into(), reported: false }
    }

    /// A bad argument of the current call.
    pub fn argument(text: impl Into<String>) -> Self {
        Self::new(Blame::Argument, text)
    }

    /// A call that the object's state does not allow.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::new(Blame::Usage, text)
    }

    /// The peer or the path to it failed.
    pub fn remote(text: impl Into<String>) -> Self {
        Self::new(Blame::Remote, text)
    }

    /// This host failed, without an errno.
    pub fn system(text: impl Into<String>) -> Self {
        Self::new(Blame::System, text)
    }

    /// A verb failed on `object` with `errno`.
    pub fn verb(verb: &'static str, object: impl fmt::Display, errno: i32) -> Self {
        Self {
            blame: Blame::System,
            errno: Some(errno),
            verb: Some(verb),
            text: format!("{verb} on {object} failed: {}{}", os_error(errno), meaning(errno)),
            reported: false,
        }
    }

    /// A system call or socket operation failed.
    pub fn io(operation: impl fmt::Display, source: &io::Error) -> Self {
        Self {
            blame: Blame::System,
            errno: source.raw_os_error(),
            verb: None,
            text: format!(
                "{operation} failed: {source}{}",
                source.raw_os_error().map(meaning).unwrap_or_default()
            ),
            reported: false,
        }
    }

    /// The same error with what was being done put in front.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.text = format!("{doing}: {}", self.text);
        self
    }

    /// The same error with an explanation behind it.
    #[must_use]
    pub fn followed_by(mut self, explanation: impl fmt::Display) -> Self {
        self.text = format!("{}{explanation}", self.text);
        self
    }

    /// The same error with the operating system's number for it.
    #[must_use]
    pub fn with_errno(mut self, errno: i32) -> Self {
        self.errno = Some(errno);
        self
    }

    /// The same error blamed on somebody else.
    #[must_use]
    pub fn blamed(mut self, blame: Blame) -> Self {
        self.blame = blame;
        self
    }

    /// The same error, marked as already told: a failed communicator repeats its code, not its message.
    #[must_use]
    pub fn repeated(&self) -> Self {
        Self { reported: true, ..self.clone() }
    }

    /// Whether the message has been told before.
    pub fn is_reported(&self) -> bool {
        self.reported
    }

    /// Who is at fault.
    pub fn blame(&self) -> Blame {
        self.blame
    }

    /// The verb that failed, if one did.
    pub fn failed_verb(&self) -> Option<&'static str> {
        self.verb
    }

    /// The operating system's error number, if one was given.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

/// "Cannot allocate memory (os error 12)" and the like.
fn os_error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// What an errno means that has one meaning wherever it comes from.
fn meaning(errno: i32) -> String {
    descriptors::shortage(errno).map_or_else(String::new, |meaning| format!(": {meaning}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_of_descriptors_is_explained_everywhere() {
        let source = io::Error::from_raw_os_error(libc::EMFILE);
        for e in [Error::io("listening", &source), Error::verb("ibv_open_device", "x", 24)] {
            assert!(e.to_string().contains("RLIMIT_NOFILE"), "{e}");
        }
    }

    #[test]
    fn a_verb_error_names_verb_object_and_errno() {
        let e = Error::verb("ibv_reg_mr", "mlx5_0:1", 12).context("regMr");
        assert_eq!(e.errno(), Some(12));
        assert_eq!(e.blame(), Blame::System);
        let text = e.to_string();
        for part in ["regMr", "ibv_reg_mr", "mlx5_0:1", "12"] {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
}
