//! From `tracing` events to the host's logger.
//!
//! The subscriber is this library's own copy and does not disturb the application's. It is installed once per load;
//! what it writes to is replaced whenever NCCL gives a logger again.

use crate::config::{LogLevel, Settings};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Once, PoisonError, RwLock};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// Where lines go: severity, source file, line number, text.
pub type Sink = fn(Level, &str, u32, &str);

static SINK: RwLock<Option<Sink>> = RwLock::new(None);
static LEVEL: AtomicU8 = AtomicU8::new(2);
static INSTALL: Once = Once::new();

/// Sends this library's events to `sink` from now on.
pub fn install(sink: Sink) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    // Fails only when this copy of tracing has a subscriber already, as in tests of the crate itself.
    INSTALL.call_once(|| drop(tracing::subscriber::set_global_default(Bridge)));
}

/// Sets how much is told: the settings' level, else what `NCCL_DEBUG` asks for, at least INFO. NCCL drops what its own
/// level hides; INFO lines are few and made outside the data path.
pub fn set_level(settings: &Settings) {
    let from_nccl = || {
        let debug = std::env::var("NCCL_DEBUG").unwrap_or_default();
        if debug.eq_ignore_ascii_case("TRACE") { Level::TRACE } else { Level::INFO }
    };
    let level = settings.log.map_or_else(from_nccl, |level| match level {
        LogLevel::Error => Level::ERROR,
        LogLevel::Warn => Level::WARN,
        LogLevel::Info => Level::INFO,
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Trace => Level::TRACE,
    });
    LEVEL.store(rank(level), Ordering::Relaxed);
    tracing::callsite::rebuild_interest_cache();
}

/// Text from outside, such as settings, paths and names, must not be able to forge lines or steer a terminal. The whole
/// text stays, whatever its length; what a user has set is quoted by [`crate::config::printable`].
pub fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn rank(level: Level) -> u8 {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        Level::INFO => 2,
        Level::DEBUG => 3,
        _ => 4,
    }
}

fn wanted(metadata: &Metadata<'_>) -> bool {
    rank(*metadata.level()) <= LEVEL.load(Ordering::Relaxed)
}

struct Bridge;

impl Subscriber for Bridge {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        wanted(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(match LEVEL.load(Ordering::Relaxed) {
            0 => LevelFilter::ERROR,
            1 => LevelFilter::WARN,
            2 => LevelFilter::INFO,
            3 => LevelFilter::DEBUG,
            _ => LevelFilter::TRACE,
        })
    }

    fn event(&self, event: &Event<'_>) {
        let sink = *SINK.read().unwrap_or_else(PoisonError::into_inner);
        let Some(sink) = sink else { return };
        let mut line = Line(String::with_capacity(160));
        event.record(&mut line);
        let metadata = event.metadata();
        sink(
            *metadata.level(),
            metadata.file().unwrap_or(""),
            metadata.line().unwrap_or(0),
            &line.0,
        );
    }

    // Spans are not used by this crate; these satisfy the trait.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The message, followed by fields as `name=value`.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = if field.name() == "message" {
            write!(self.0, "{value:?}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::one_line;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_but_control_characters_changes(text in any::<String>()) {
            let shown = one_line(&text);
            prop_assert!(!shown.contains(char::is_control));
            prop_assert_eq!(shown.chars().count(), text.chars().count());
            let mut pairs = shown.chars().zip(text.chars());
            prop_assert!(pairs.all(|(a, b)| a == b || (a == '?' && b.is_control())));
        }
    }
}
