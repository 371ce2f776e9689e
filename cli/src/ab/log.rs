//! What NCCL's log says about the network that a run used, and what pinrail says about its settings.

use super::table::without_mark;
use std::collections::BTreeMap;

/// So many different texts of one kind are kept; ranks say the same.
const MOST: usize = 64;
/// No text that is kept is longer.
const LONGEST: usize = 2000;

/// The network names of NCCL's own transports.
pub const INTERNAL: [&str; 2] = ["IB", "Socket"];

/// What was said, and how often.
pub type Said = BTreeMap<String, u32>;

/// The lines that matter, read one by one.
#[derive(Debug, Default)]
pub struct Log {
    /// Networks that ranks chose: `Using network IB`.
    pub networks: Said,
    /// Networks that channels go over: `via NET/IB/0`.
    pub channels: Said,
    /// Channels that stay within a host: `via P2P/…`, `via SHM/…`.
    pub within: u32,
    /// Plugins that were loaded: `pinrail (v12)`.
    pub loaded: Said,
    /// The release of NCCL.
    pub version: Option<String>,
    /// pinrail's line about its settings.
    pub settings: Said,
    /// Lines of NCCL's log, of whatever kind.
    pub lines: u64,
}

impl Log {
    /// Takes the next line.
    pub fn line(&mut self, line: &str) {
        if line.contains(" NCCL ") {
            self.lines += 1;
        }
        if let Some(rest) = after(line, "NCCL version ") {
            self.version.get_or_insert_with(|| first_word(rest).to_owned());
        }
        if let Some(rest) = after(line, "Using network ") {
            count(&mut self.networks, rest.trim());
        }
        if let Some(rest) = after(line, "Loaded net plugin ") {
            count(&mut self.loaded, rest.trim());
        }
        if let Some(rest) = after(line, " via NET/") {
            count(&mut self.channels, rest.split('/').next().unwrap_or_default());
        } else if line.contains(" via P2P/") || line.contains(" via SHM/") {
            self.within = self.within.saturating_add(1);
        }
        if let Some(rest) = after(without_mark(line), "NET/pinrail: ")
            && let Some((version, settings)) = rest.split_once(" settings: ")
            && version.starts_with("pinrail ")
        {
            count(&mut self.settings, &format!("{version}: {}", settings.trim()));
        }
    }

    /// All networks that it names.
    pub fn used(&self) -> Vec<&str> {
        let mut used: Vec<&str> =
            self.networks.keys().chain(self.channels.keys()).map(String::as_str).collect();
        used.sort_unstable();
        used.dedup_by(|a, b| a.eq_ignore_ascii_case(b));
        used
    }

    /// Adds what another run said.
    pub fn merge(&mut self, other: &Self) {
        let add = |to: &mut Said, from: &Said| {
            for (text, times) in from {
                if to.len() < MOST || to.contains_key(text) {
                    let sum = to.entry(text.clone()).or_default();
                    *sum = sum.saturating_add(*times);
                }
            }
        };
        add(&mut self.networks, &other.networks);
        add(&mut self.channels, &other.channels);
        add(&mut self.loaded, &other.loaded);
        add(&mut self.settings, &other.settings);
        self.within = self.within.saturating_add(other.within);
        self.lines += other.lines;
        if self.version.is_none() {
            self.version.clone_from(&other.version);
        }
    }
}

fn after<'a>(line: &'a str, mark: &str) -> Option<&'a str> {
    line.split_once(mark).map(|(_, rest)| rest)
}

fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

fn count(said: &mut Said, text: &str) {
    let text: String = text.chars().take(LONGEST).collect();
    if text.is_empty() || (said.len() >= MOST && !said.contains_key(&text)) {
        return;
    }
    let times = said.entry(text).or_default();
    *times = times.saturating_add(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Log {
        let mut log = Log::default();
        text.lines().for_each(|line| log.line(line));
        log
    }

    #[test]
    fn releases_say_it_in_their_own_words() {
        let old = read(
            "n1:10:10 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation\n\
             n1:10:10 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:10.0.0.1<0>\n\
             n1:10:10 [0] NCCL INFO Using network IB\n\
             NCCL version 2.12.12+cuda11.4\n\
             n1:10:22 [0] NCCL INFO Channel 00 : 1[2000] -> 0[1000] [receive] via NET/IB/0/GDRDMA\n",
        );
        assert_eq!(old.used(), ["IB"]);
        assert_eq!(old.version.as_deref(), Some("2.12.12+cuda11.4"));
        let new = read(
            "[1,0]<stdout>:n1:10:11 [0] NCCL INFO NET/Plugin: Loaded net plugin pinrail (v12)\n\
             n1:10:11 [0] NCCL INFO Successfully loaded external network plugin libnccl-net-pinrail.so\n\
             n1:10:11 [0] NCCL INFO Initialized NET plugin pinrail\n\
             n1:10:11 [0] NCCL INFO Assigned NET plugin pinrail to comm\n\
             n1:10:11 [0] NCCL INFO Using network pinrail\n\
             n1:10:11 [0] NCCL INFO NET/pinrail: pinrail 0.1.0 settings: all default; unlike stock: NCCL_IB_USE_INLINE=1 (stock 0)\n\
             n1:10:12 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/pinrail/0/GDRDMA\n\
             n1:10:12 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM\n",
        );
        assert_eq!(new.used(), ["pinrail"]);
        assert_eq!(new.loaded.keys().collect::<Vec<_>>(), ["pinrail (v12)"]);
        assert_eq!((new.within, new.channels["pinrail"]), (1, 1));
        assert_eq!(
            new.settings.keys().collect::<Vec<_>>(),
            ["pinrail 0.1.0: all default; unlike stock: NCCL_IB_USE_INLINE=1 (stock 0)"]
        );
    }

    #[test]
    fn ranks_that_differ_are_told_apart_and_runs_add_up() {
        let mut one = read("a NCCL INFO Using network pinrail\n");
        one.merge(&read("b NCCL INFO Using network IB\nb NCCL INFO Using network IB\n"));
        assert_eq!(one.used(), ["IB", "pinrail"]);
        assert_eq!(one.networks["IB"], 2);
    }

    proptest! {
        #[test]
        fn any_line_is_read(lines in prop::collection::vec(".{0,80}", 0..20)) {
            let mut log = Log::default();
            lines.iter().for_each(|line| log.line(line));
            prop_assert!(log.networks.len() <= MOST);
        }
    }
}
