//! What forked children of this process keep of its memory: whether the verbs library is asked to take registered pages
//! from them, what is done about memory that shares its pages, and the check that says whether all is well.

use super::registration::Room;
use crate::config::{ForkCollateral, ForkPolicy, RegFallback, Settings};
use crate::error::Result;
use crate::host::fork::{Known, Library, Variables};
use crate::memory::collateral::{Collateral, Entry, How, Neighbourhood, Shared, Sharing, Sums};
use crate::memory::forkcheck::{self, Check};
use crate::memory::marks::Marks;
use crate::verbs::{ForkAnswer, Verbs};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Findings of a check that are told one by one.
const TOLD: usize = 8;

/// When a check is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The first memory was registered with a connection.
    Registered,
    /// The first connection is about to give its registrations back.
    Closing,
    /// The last user is gone.
    Idle,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Registered => "after the first registration",
            Self::Closing => "before the first connection closes",
            Self::Idle => "after the last close",
        })
    }
}

/// How this process stands with forks.
#[derive(Debug)]
pub struct Fork {
    policy: ForkPolicy,
    collateral_policy: ForkCollateral,
    may_copy: bool,
    check: bool,
    /// What the library said before anything was done.
    answer: Option<ForkAnswer>,
    /// Whether the plugin armed the library.
    armed: bool,
    library: Library,
    variables: Variables,
    marks: Marks,
    account: Arc<Collateral>,
    /// A bit for each moment whose check was made.
    checked: AtomicU8,
}

impl Fork {
    /// Arms the library or not, as the settings and its own answer want it, and says so. Must come before any other verb.
    pub fn prepare(verbs: &Verbs, settings: &Settings) -> Self {
        let answer = verbs.fork_answer();
        let arm = match settings.fork {
            ForkPolicy::Auto => answer != Some(ForkAnswer::Unneeded),
            ForkPolicy::Arm => true,
            ForkPolicy::Never => false,
        };
        let armed = arm
            && verbs
                .arm_fork()
                .inspect_err(|e| {
                    tracing::warn!(
                        "ibv_fork_init failed ({e}): memory was registered before; a fork() may corrupt it"
                    );
                })
                .is_ok();
        let fork = Self {
            policy: settings.fork,
            collateral_policy: settings.fork_collateral,
            may_copy: settings.reg_fallback == RegFallback::Bounce,
            check: settings.fork_check,
            answer,
            armed,
            library: Library::of(verbs.file()),
            variables: Variables::of_process(),
            marks: Marks::default(),
            account: Arc::default(),
            checked: AtomicU8::new(0),
        };
        tracing::info!("{fork}");
        if settings.fork == ForkPolicy::Never && !fork.harmless() {
            tracing::warn!(
                "PINRAIL_FORK=never: the kernel does not copy pinned pages for a child as far as is known, and nothing \
                 keeps them from children: after a fork a device's write can change what the child sees, or be lost for \
                 this process. Set PINRAIL_FORK=auto unless nothing ever forks"
            );
        }
        fork
    }

    /// Whether the kernel copies pinned pages for a child.
    fn copies_pinned(&self) -> Known {
        match self.answer {
            Some(ForkAnswer::Unneeded) => Known::Yes,
            Some(ForkAnswer::Disabled | ForkAnswer::Enabled) => Known::No,
            Some(ForkAnswer::Other(_)) | None => Known::Unknown,
        }
    }

    /// Whether a fork can do no harm to data that devices write.
    fn harmless(&self) -> bool {
        self.armed
            || self.variables.arm()
            || self.copies_pinned() == Known::Yes
            || self.answer == Some(ForkAnswer::Enabled)
            || self.marks.known() == Known::Yes
    }

    /// Whether registrations take their pages from children, before anything is registered.
    fn expected(&self) -> bool {
        let when_armed = self.library.marks_when_armed(self.copies_pinned());
        match (self.armed, self.variables.arm()) {
            (true, _) => when_armed != Known::No,
            (false, true) => when_armed == Known::Yes,
            (false, false) => self.answer == Some(ForkAnswer::Enabled),
        }
    }

    /// Whether registrations take their pages from children.
    pub fn marks(&self) -> Known {
        self.marks.known()
    }

    fn marks_or_may(&self) -> bool {
        match self.marks() {
            Known::Yes => true,
            Known::No => false,
            Known::Unknown => self.expected(),
        }
    }

    /// Memory of a caller that shares its pages, if that is worth a thought: `None` too where nobody would see it.
    pub(super) fn shared(&self, addr: usize, len: usize) -> Option<Shared> {
        let (sharing, how) = if self.marks_or_may() {
            (Sharing::of_mapped(addr, len)?, How::Registered)
        } else {
            (Sharing::of(addr, len)?, How::Harmless)
        };
        Some(Shared { addr, len, pages: sharing.pages(addr, len), how })
    }

    /// Decides how such memory is reached: the room for copies, where that is what is wanted and there is some. Says so,
    /// and enters it in the account.
    pub(super) fn enter(
        &self,
        mut shared: Shared,
        room: impl FnOnce() -> Option<Result<Room>>,
    ) -> (Entry, Option<Room>) {
        let (mut copies, mut why) = (None, String::new());
        if shared.how == How::Registered {
            match (self.collateral_policy, self.may_copy) {
                (ForkCollateral::Register, _) => {
                    why = "PINRAIL_FORK_COLLATERAL=register".to_owned();
                }
                (_, false) => why = "PINRAIL_REG_FALLBACK=fail allows no copies".to_owned(),
                (ForkCollateral::Bounce, true) => match room() {
                    Some(Ok(room)) => copies = Some(room),
                    Some(Err(e)) => why = format!("copies are not possible: {e}"),
                    None => why = "copies are not allowed".to_owned(),
                },
            }
            if copies.is_some() {
                shared.how = How::Copied;
            }
        }
        self.tell(&shared, &why);
        (self.account.enter(shared), copies)
    }

    /// A warning for the first of a kind, and a line of detail for each.
    fn tell(&self, shared: &Shared, why: &str) {
        let Shared { addr, len, pages, how } = shared;
        if *how == How::Harmless && !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let around = Neighbourhood::of(*addr);
        tracing::debug!(
            address = format_args!("{addr:#x}"),
            bytes = *len,
            bytes_of_pages = pages.len(),
            memory = %around,
            how = ?how,
            "shares its pages"
        );
        if *how == How::Harmless || !self.account.is_news(around.kind, *how) {
            return;
        }
        let (withheld, foreign) = (pages.len(), pages.len().saturating_sub(*len));
        let what = format!(
            "{len} bytes at {addr:#x} in {around} do not own their pages: registering them takes {withheld} bytes from \
             forked children, {foreign} of which nobody asked for"
        );
        let cure = "Memory that begins and ends with a page avoids it; docs/fork.md. Told once for this kind of memory";
        if *how == How::Copied {
            tracing::warn!(
                "{what}. They are copied through memory that owns its pages instead; PINRAIL_FORK_COLLATERAL=register \
                 registers them all the same. {cure}"
            );
        } else {
            tracing::warn!(
                "{what}. They are registered all the same ({why}): a child that touches those pages is killed. {cure}"
            );
        }
    }

    /// Memory that shares its pages: what is in use, and what ever was.
    pub fn sums(&self) -> (Sums, Sums) {
        self.account.sums()
    }

    /// Checks what children have, if the settings want it and it was not done at this moment before.
    pub(super) fn check_once(&self, moment: Moment) {
        let bit = 1 << moment as u8;
        if self.check && self.checked.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.check_now(moment);
        }
    }

    fn check_now(&self, moment: Moment) {
        let fork = self.copies_pinned() == Known::Yes || self.marks() == Known::Yes;
        match forkcheck::check(self.account.withheld(), fork) {
            Ok(check) => self.report(moment, &check),
            Err(e) => tracing::warn!("fork check {moment} failed: {e}"),
        }
        if !fork {
            tracing::warn!(
                "fork check {moment}: no child was forked, because that is not safe in this process: pinned pages are \
                 neither copied for children nor kept from them ({self})"
            );
        }
    }

    fn report(&self, moment: Moment, check: &Check) {
        if check.findings.is_empty() {
            tracing::info!("fork check {moment}: {}; {check}", verdict(check));
            return;
        }
        for finding in check.findings.iter().take(TOLD) {
            tracing::warn!(
                "fork check {moment}: {finding}. `pinrail forks {} --core-address {:#x}` shows more",
                std::process::id(),
                finding.range.start
            );
        }
        let (findings, more) = (check.findings.len(), check.findings.len().saturating_sub(TOLD));
        tracing::warn!(
            "fork check {moment}: {findings} findings, {more} of them not shown; {check}"
        );
    }
}

/// What a check without findings comes to: only a child that was forked knows what it has.
fn verdict(check: &Check) -> &'static str {
    if check.pages.is_some() { "clean" } else { "nothing is marked, and no child was asked" }
}

impl fmt::Display for Fork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copies = self.copies_pinned();
        let kernel = match copies {
            Known::Yes => "the kernel copies pinned pages for a child",
            Known::No => "the kernel does not copy pinned pages for a child",
            Known::Unknown => "whether the kernel copies pinned pages for a child is not known",
        };
        let state = if self.armed { "armed" } else { "not armed by pinrail" };
        let lose = match (self.marks(), self.expected(), self.variables.arm()) {
            (Known::Yes, ..) => "children do not get registered pages",
            (Known::No, ..) => "children get all pages",
            (Known::Unknown, true, _) => {
                "children do not get pages that are registered from here on"
            }
            (Known::Unknown, false, true) => "whether children get registered pages will show",
            (Known::Unknown, false, false) => {
                "children get all pages unless somebody else armed the library"
            }
        };
        write!(
            f,
            "fork safety: {state} (PINRAIL_FORK={}), {lose}: {kernel}; {}; {}",
            self.policy,
            self.library,
            self.variables.describe(&self.library, copies)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_child_a_check_is_not_clean() {
        let mut check = Check::default();
        assert!(!verdict(&check).contains("clean"), "{}", verdict(&check));
        check.pages = Some(1);
        assert_eq!(verdict(&check), "clean");
    }
}
