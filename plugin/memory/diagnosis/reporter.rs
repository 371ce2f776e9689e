//! Telling a diagnosis: one line in the log, one file for each event.

use super::report::Report;
use super::verdict::Cause;
use crate::config::Settings;
use crate::records::Records;
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Files that one process writes; a job that fails for ever must not fill a disk.
const MOST_FILES: u32 = 64;
/// Files for one cause and kind of outcome: what is harmless must not use up the room of what ends a job.
const MOST_ALIKE: u32 = 16;
/// Pairs of cause and device that are remembered. Beyond them nothing is told at WARN.
const MOST_TOLD: usize = 256;

/// What comes of a failed registration: one clause without a full stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The caller gets what it asked for in another way.
    GoesOn(String),
    /// The caller gets an error.
    Fails(String),
}

impl Outcome {
    /// Whether something fails, and the clause.
    fn parts(&self) -> (bool, &str) {
        match self {
            Self::GoesOn(what) => (false, what),
            Self::Fails(what) => (true, what),
        }
    }
}

/// Tells diagnoses. One for the whole process.
#[derive(Debug, Default)]
pub struct Reporter {
    records: Records,
    files: Mutex<Files>,
    told: Mutex<HashSet<(Cause, bool, String)>>,
}

/// How many files were written, or tried.
#[derive(Debug, Default)]
struct Files {
    all: u32,
    alike: HashMap<(Cause, bool), u32>,
}

impl Files {
    /// The number of the next file; `None`: there are enough.
    fn next(&mut self, cause: Cause, fails: bool) -> Option<u32> {
        let alike = self.alike.entry((cause, fails)).or_default();
        if self.all >= MOST_FILES || *alike >= MOST_ALIKE {
            return None;
        }
        *alike += 1;
        self.all += 1;
        Some(self.all - 1)
    }
}

impl Reporter {
    /// One that writes where the settings say.
    pub fn from_settings(settings: &Settings) -> Self {
        Self { records: Records::new(settings.report_dir.clone()), ..Self::default() }
    }

    /// Writes the record and one line in the log, with what the plugin does about it. The first line about a cause on a
    /// device is a warning, and so is the first after which something fails; later ones are for debugging. Returns
    /// whether it was told as a warning. A record that cannot be written is one warning and nothing else.
    pub fn tell(&self, report: &Report, outcome: &Outcome) -> bool {
        let verdict = report.verdict();
        let (cause, confidence) = (verdict.cause.word(), verdict.confidence.word());
        let errno = report.failure().errno;
        let (fails, meanwhile) = outcome.parts();
        let record = self.write(report, outcome);
        let record = record.as_ref().map_or_else(|| "none".into(), |path| path.to_string_lossy());
        let text =
            format!("{}. Meanwhile: {meanwhile}. Asked for: {}", report.line(), report.asked());
        let first = self.is_first(verdict.cause, fails, &report.failure().device);
        if first {
            tracing::warn!(cause, confidence, errno, %record, "{text}");
        } else {
            tracing::debug!(cause, confidence, errno, %record, "{text}");
        }
        first
    }

    /// Whether it was told of this device that memory lies where it cannot be pinned. What else there is to say about
    /// another buffer of that kind is not worth long searches: there may be hundreds.
    pub fn knows(&self, device: &str) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.iter().any(|(cause, _, known)| *cause == Cause::Placement && known == device)
    }

    /// Whether nothing was told yet about this cause and kind of outcome on this device.
    fn is_first(&self, cause: Cause, fails: bool, device: &str) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.len() < MOST_TOLD && told.insert((cause, fails, device.to_owned()))
    }

    /// Writes the record; `None`: none is wanted, enough were written, or it cannot be.
    fn write(&self, report: &Report, outcome: &Outcome) -> Option<PathBuf> {
        if !self.records.are_wanted() {
            return None;
        }
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let (fails, what) = outcome.parts();
        let number = files.next(report.verdict().cause, fails)?;
        drop(files);
        let mut record = report.json();
        record["outcome"] = json!({ "fails": fails, "what": what });
        self.records.write("registration", number, &record)
    }
}
