//! One answer of the doctor.

/// How much an answer matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Fine,
    /// May be meant so, or costs something.
    Advice,
    /// It could not be told, and the verdict hangs on it.
    Unknown,
    /// It keeps pinrail from working, or from working well.
    Problem,
}

impl Level {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Advice => "advice",
            Self::Unknown => "unknown",
            Self::Problem => "problem",
        }
    }
}

/// What was found about one thing.
#[derive(Debug, Clone)]
pub struct Finding {
    /// The check that says so, a word that never changes.
    pub check: &'static str,
    /// How much it matters.
    pub level: Level,
    /// What is so.
    pub what: String,
    /// How that is known, with numbers and files.
    pub evidence: String,
    /// What to do; empty where there is nothing to do.
    pub remedy: String,
}

impl Finding {
    /// As it should be.
    pub fn fine(check: &'static str, what: impl Into<String>, evidence: impl Into<String>) -> Self {
        Self::of(check, Level::Fine, what, evidence, "")
    }

    /// May be meant so, or costs something.
    pub fn advice(
        check: &'static str,
        what: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::of(check, Level::Advice, what, evidence, remedy)
    }

    /// The verdict hangs on something that cannot be read.
    pub fn unknown(
        check: &'static str,
        what: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::of(check, Level::Unknown, what, evidence, remedy)
    }

    /// It keeps pinrail from working, or from working well.
    pub fn problem(
        check: &'static str,
        what: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::of(check, Level::Problem, what, evidence, remedy)
    }

    /// With a level that was worked out.
    pub fn of(
        check: &'static str,
        level: Level,
        what: impl Into<String>,
        evidence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { check, level, what: what.into(), evidence: evidence.into(), remedy: remedy.into() }
    }
}

/// The exit status that answers add up to.
pub fn exit_code(findings: &[Finding]) -> u8 {
    match findings.iter().map(|finding| finding.level).max() {
        Some(Level::Problem) => 1,
        Some(Level::Unknown) | None => 2,
        Some(Level::Fine | Level::Advice) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_answer_decides() {
        let of = |levels: &[Level]| {
            let findings: Vec<_> =
                levels.iter().map(|level| Finding::of("x", *level, "", "", "")).collect();
            exit_code(&findings)
        };
        assert_eq!(of(&[Level::Fine, Level::Advice]), 0);
        assert_eq!(of(&[Level::Fine, Level::Unknown, Level::Advice]), 2);
        assert_eq!(of(&[Level::Unknown, Level::Problem]), 1);
        assert_eq!(of(&[]), 2);
    }
}
