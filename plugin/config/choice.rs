//! Settings that are one of a few choices.

use std::ffi::OsStr;
use std::fmt;

use super::value::{Form, Reading, Refused, Unit, Value, trimmed};

/// `NCCL_IB_PCI_RELAXED_ORDERING`: whether bulk memory is registered with relaxed PCI ordering.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RelaxedOrdering {
    /// 0: never.
    Off,
    /// 1: always; initialisation fails where the library cannot.
    Required,
    /// 2: where the library can.
    #[default]
    Auto,
}

impl Value for RelaxedOrdering {
    fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
        let number = u8::read(text, &Form::Number { min: 0, max: 2, unit: Unit::None })?;
        let value = match number.value {
            0 => Self::Off,
            1 => Self::Required,
            _ => Self::Auto,
        };
        Ok(Reading { value, clamped: number.clamped, remarks: number.remarks })
    }
    fn show(&self, _: &Form) -> String {
        match self {
            Self::Off => "0",
            Self::Required => "1",
            Self::Auto => "2",
        }
        .to_owned()
    }
}

/// Implements the text form of an enum whose variants are words.
macro_rules! words {
    ($ty:ident { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $ty {
            /// The words the variable accepts.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            fn from_word(word: &str) -> Option<Self> {
                $( if word.eq_ignore_ascii_case($word) { return Some(Self::$variant); } )+
                None
            }
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Self::$variant => $word ),+ })
            }
        }

        impl Value for $ty {
            fn read(text: &OsStr, _: &Form) -> Result<Reading<Self>, Refused> {
                Self::from_word(trimmed(text)?).map(Reading::exact).ok_or(Refused)
            }
            fn show(&self, _: &Form) -> String {
                self.to_string()
            }
        }
    };
}

/// `PINRAIL_FLUSH`: when a receive into GPU memory is followed by a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FlushPolicy {
    /// Where GPU memory can be registered, unless `NCCL_GDR_FLUSH_DISABLE` is 1.
    #[default]
    Auto,
    /// For every flush NCCL asks for, whatever the memory.
    Always,
    /// Never; the user vouches that the platform orders the NIC's writes before GPU reads.
    Never,
}
words!(FlushPolicy { Auto = "auto", Always = "always", Never = "never" });

/// `PINRAIL_FLUSH_METHOD`: what makes received data visible to a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FlushMethod {
    /// A read over the device that wrote them.
    #[default]
    Read,
    /// The CUDA driver where the GPU offers it, else a read.
    Cuda,
}
words!(FlushMethod { Read = "read", Cuda = "cuda" });

/// `PINRAIL_REG_FALLBACK`: what happens with host memory that cannot be pinned where it lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RegFallback {
    /// It is copied through memory that was pinned first.
    #[default]
    Bounce,
    /// The registration fails.
    Fail,
}
words!(RegFallback { Bounce = "bounce", Fail = "fail" });

/// `PINRAIL_FORK`: whether the verbs library is asked to keep registered pages from forked children.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ForkPolicy {
    /// Unless the library says that the kernel makes it unnecessary.
    #[default]
    Auto,
    /// Always.
    Arm,
    /// Never; the user vouches that nothing forks, or that the kernel copies pinned pages for a child.
    Never,
}
words!(ForkPolicy { Auto = "auto", Arm = "arm", Never = "never" });

/// `PINRAIL_FORK_COLLATERAL`: what happens with host memory that shares its pages, where registering it would take those
/// pages from forked children.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ForkCollateral {
    /// It is copied through memory that owns its pages.
    #[default]
    Bounce,
    /// It is registered all the same.
    Register,
}
words!(ForkCollateral { Bounce = "bounce", Register = "register" });

/// `PINRAIL_PROFILER`: whether NCCL's profiler is told of transfers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProfilerPolicy {
    /// While it answers, and asked now and then whether it does.
    #[default]
    Auto,
    /// Of each, whether or not it answers.
    On,
    /// Never.
    Off,
}
words!(ProfilerPolicy { Auto = "auto", On = "on", Off = "off" });

/// `PINRAIL_LOG`: the least important message that is still logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Failures only.
    Error,
    /// And what is likely wrong.
    #[default]
    Warn,
    /// And what was chosen and why.
    Info,
    /// And counts of unusual events.
    Debug,
    /// And every step.
    Trace,
}
words!(LogLevel {
    Error = "error",
    Warn = "warn",
    Info = "info",
    Debug = "debug",
    Trace = "trace",
});

impl Value for Option<LogLevel> {
    fn read(text: &OsStr, form: &Form) -> Result<Reading<Self>, Refused> {
        LogLevel::read(text, form).map(|reading| Reading::exact(Some(reading.value)))
    }
    fn show(&self, _: &Form) -> String {
        self.map_or_else(String::new, |level| level.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_reads_back() {
        for word in FlushPolicy::WORDS {
            assert_eq!(FlushPolicy::from_word(word).unwrap().to_string(), *word);
        }
        for word in RegFallback::WORDS {
            assert_eq!(RegFallback::from_word(word).unwrap().to_string(), *word);
        }
        for word in LogLevel::WORDS {
            assert_eq!(LogLevel::from_word(word).unwrap().to_string(), *word);
        }
        for word in ForkPolicy::WORDS {
            assert_eq!(ForkPolicy::from_word(word).unwrap().to_string(), *word);
        }
        for word in ProfilerPolicy::WORDS {
            assert_eq!(ProfilerPolicy::from_word(word).unwrap().to_string(), *word);
        }
        for word in FlushMethod::WORDS {
            assert_eq!(FlushMethod::from_word(word).unwrap().to_string(), *word);
        }
        for word in ForkCollateral::WORDS {
            assert_eq!(ForkCollateral::from_word(word).unwrap().to_string(), *word);
        }
        assert_eq!(LogLevel::from_word("WARN"), Some(LogLevel::Warn));
        assert_eq!(FlushPolicy::from_word("sometimes"), None);
        assert!(LogLevel::Error < LogLevel::Trace);
    }

    #[test]
    fn relaxed_ordering_is_a_number() {
        let read = |text| RelaxedOrdering::read(OsStr::new(text), &Form::Flag);
        assert_eq!(read("1"), Ok(Reading::exact(RelaxedOrdering::Required)));
        assert!(read("3").unwrap().clamped);
        assert_eq!(read("on"), Err(Refused));
    }
}
