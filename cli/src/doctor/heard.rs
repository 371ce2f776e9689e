//! What the plugin's code says while it looks at something: the lines that a job would have in its log.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

type Lines = Arc<Mutex<Vec<String>>>;

/// Does something, and gives what was said meanwhile at level info and above.
pub fn heard<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let lines = Lines::default();
    let result = tracing::subscriber::with_default(Listener(Arc::clone(&lines)), work);
    let lines = std::mem::take(&mut *lines.lock().unwrap_or_else(PoisonError::into_inner));
    (result, lines)
}

struct Listener(Lines);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            // A String takes everything.
            let _ = write!(self.0, "{value:?}");
        }
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(message.0);
    }

    // The plugin has no spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_job_would_be_told_is_heard() {
        let (result, lines) = heard(|| {
            tracing::info!("{} is left out", "mlx5_0:1");
            tracing::debug!("not this");
            tracing::warn!("and this");
            5
        });
        assert_eq!((result, lines), (5, vec!["mlx5_0:1 is left out".into(), "and this".into()]));
    }
}
