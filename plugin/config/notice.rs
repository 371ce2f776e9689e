//! What reading the settings has to tell the user.

use std::fmt;
use std::path::PathBuf;

/// Values longer than this are cut in messages.
const SHOWN_CHARS: usize = 120;

/// Where a value comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    #[default]
    Default,
    /// The environment of the process.
    Environment,
    /// One of NCCL's configuration files.
    File(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Environment => f.write_str("environment"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// How important a notice is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// A value does not have the effect its author meant.
    Warn,
    /// For the record.
    Info,
}

/// What a notice is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topic {
    /// A number was outside its range and the nearest bound is used.
    Clamped,
    /// The text could not be read and the default is used.
    Unparsable,
    /// The name is not known.
    Unknown,
    /// The variable is known and has no effect here.
    NotApplicable,
    /// The value is used, and is probably not what was meant.
    Remark,
    /// A configuration file that was asked for could not be read.
    File,
    /// Lines of a configuration file that do nothing.
    Line,
}

impl Topic {
    /// How important notices of this kind are.
    pub fn severity(self) -> Severity {
        match self {
            Self::NotApplicable => Severity::Info,
            _ => Severity::Warn,
        }
    }
}

/// One line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The variable, or the file for [`Topic::File`] and [`Topic::Line`].
    pub subject: String,
    /// What it is about.
    pub topic: Topic,
    /// The whole line.
    pub text: String,
}

impl Notice {
    /// How important it is.
    pub fn severity(&self) -> Severity {
        self.topic.severity()
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A value as it may be put into a log line: one line, printable, of bounded length.
pub fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn printable_text_is_one_short_line(text in any::<String>()) {
            let shown = printable(&text);
            prop_assert!(!shown.chars().any(char::is_control));
            prop_assert!(shown.chars().count() <= SHOWN_CHARS * 10 + 1);
        }
    }
}
