//! What is compared: a plugin, and the variables that make NCCL take it.

use super::log::{INTERNAL, Log};
use nccl_net_pinrail::config::printable;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The plugin that NCCL is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plugin {
    /// None: NCCL's own transport.
    None,
    /// By name, found by the loader.
    Name(String),
    /// A file.
    File(PathBuf),
}

impl Plugin {
    /// Reads an argument: whatever has a slash is a file.
    ///
    /// # Errors
    /// It is empty, or there is no such file.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("a plugin is a name, a path, or none".into()),
            "none" => Ok(Self::None),
            _ if text.contains('/') => {
                let path = Path::new(text).canonicalize();
                let path = path.map_err(|error| format!("{}: {error}", printable(text)))?;
                if path.is_file() {
                    Ok(Self::File(path))
                } else {
                    Err(format!("{} is no file", printable(text)))
                }
            }
            _ if Path::new(text).is_file() => Err(format!(
                "{} is a name to NCCL, and a file here; write ./{} for the file",
                printable(text),
                printable(text)
            )),
            _ => Ok(Self::Name(text.to_owned())),
        }
    }

    fn is_pinrail(&self) -> bool {
        match self {
            Self::None => false,
            Self::Name(name) => name == "pinrail",
            Self::File(path) => path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("libnccl-net-pinrail")),
        }
    }

    /// What `NCCL_NET_PLUGIN` says.
    fn value(&self) -> String {
        match self {
            Self::None => "none".into(),
            Self::Name(name) => name.clone(),
            Self::File(path) => path.to_string_lossy().into_owned(),
        }
    }
}

/// One of the two.
#[derive(Debug, Clone)]
pub struct Side {
    /// `A` or `B`.
    pub letter: &'static str,
    /// The plugin.
    pub plugin: Plugin,
    /// Variables that the user gave it.
    pub given: Vec<(String, String)>,
    /// What is set for its runs; `None`: what is removed.
    pub environment: BTreeMap<String, Option<String>>,
}

/// Whether a run used what it should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Used {
    /// It did: the network's name.
    Right(String),
    /// It did not.
    Wrong(String),
    /// It could not be told.
    Unknown(String),
}

impl Side {
    /// A side with its variables. `more` are the user's, and win; `inherited` is the environment of this process.
    pub fn new(
        letter: &'static str,
        plugin: Plugin,
        more: &[(String, String)],
        inherited: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let mut environment = BTreeMap::new();
        environment.insert("NCCL_NET_PLUGIN".to_owned(), Some(plugin.value()));
        // By name a fallback is an error. What other plugins call themselves is known only when they are loaded.
        let net = match &plugin {
            Plugin::None => Some("IB".to_owned()),
            plugin if plugin.is_pinrail() => Some("pinrail".to_owned()),
            Plugin::Name(_) | Plugin::File(_) => None,
        };
        environment.insert("NCCL_NET".to_owned(), net);
        if inherited("NCCL_DEBUG").is_none_or(|level| level.trim().is_empty()) {
            environment.insert("NCCL_DEBUG".to_owned(), Some("INFO".to_owned()));
        }
        for (name, value) in more {
            environment.insert(name.clone(), Some(value.clone()));
        }
        Self { letter, plugin, given: more.to_vec(), environment }
    }

    /// Its plugin as people read it.
    pub fn name(&self) -> String {
        match &self.plugin {
            Plugin::None => "none (NCCL's own transport)".into(),
            plugin => plugin.value(),
        }
    }

    /// Its plugin for a heading, with what else makes it differ.
    pub fn short(&self) -> String {
        let name = match &self.plugin {
            Plugin::File(path) => path.file_name().map(|name| name.to_string_lossy().into_owned()),
            Plugin::None | Plugin::Name(_) => None,
        };
        let given: Vec<_> =
            self.given.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let with =
            if given.is_empty() { String::new() } else { format!(" with {}", given.join(", ")) };
        name.unwrap_or_else(|| self.name()) + &with
    }

    /// The network that its runs must use, where it is known before.
    fn wanted(&self) -> Option<&str> {
        self.environment.get("NCCL_NET")?.as_deref().filter(|name| !name.is_empty())
    }

    /// Whether the runs with this log used what they should have.
    pub fn used(&self, log: &Log) -> Used {
        let used = log.used();
        let Some(first) = used.first() else {
            return Used::Unknown(if log.lines == 0 {
                "there is no line of NCCL's log, so that the network cannot be told: NCCL_DEBUG must be INFO, \
                 NCCL_DEBUG_FILE not set, and both must reach every rank"
                    .into()
            } else {
                "no line of NCCL's log names a network: is NCCL_DEBUG=INFO set, and does NCCL_DEBUG_SUBSYS, if it is set, \
                 have INIT and NET?"
                    .into()
            });
        };
        if used.len() > 1 {
            return Used::Wrong(format!(
                "ranks used different networks: {}. A rank that the variables do not reach takes another one: with Open \
                 MPI add -x NCCL_NET_PLUGIN -x NCCL_NET -x NCCL_DEBUG",
                used.join(", ")
            ));
        }
        let internal = || INTERNAL.iter().any(|name| name.eq_ignore_ascii_case(first));
        let right = match (self.wanted(), &self.plugin) {
            (Some(wanted), _) => wanted.eq_ignore_ascii_case(first),
            (None, Plugin::None) => internal(),
            (None, _) => !internal(),
        };
        if !right {
            let wanted = self.wanted().map_or_else(|| self.name(), str::to_owned);
            return Used::Wrong(format!("network {first} was used, not {wanted}"));
        }
        if log.channels.is_empty() && log.within > 0 {
            return Used::Unknown(format!(
                "{first} was chosen, and no channel goes over it: all ranks are on one host and use P2P or shared memory. \
                 Start them on several hosts, or set NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"
            ));
        }
        Used::Right((*first).to_owned())
    }
}

/// The variables in which two sides differ: name, and what each has.
pub fn differences(a: &Side, b: &Side) -> Vec<(String, Option<String>, Option<String>)> {
    let mut names: Vec<&String> = a.environment.keys().chain(b.environment.keys()).collect();
    names.sort();
    names.dedup();
    names
        .into_iter()
        .filter_map(|name| {
            // What only one side sets, the other has from this process.
            let of = |side: &Side| match side.environment.get(name) {
                Some(value) => value.clone(),
                None => std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()),
            };
            let (a, b) = (of(a), of(b));
            (a != b).then(|| (name.clone(), a, b))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(plugin: Plugin) -> Side {
        Side::new("A", plugin, &[], |_| None)
    }

    fn log(text: &str) -> Log {
        let mut log = Log::default();
        text.lines().for_each(|line| log.line(line));
        log
    }

    const IB: &str = "n1:1:2 [0] NCCL INFO Using network IB\nn1:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0\n";

    #[test]
    fn a_plugin_is_a_name_a_file_or_none() {
        assert_eq!(Plugin::parse("none"), Ok(Plugin::None));
        assert_eq!(Plugin::parse("pinrail"), Ok(Plugin::Name("pinrail".into())));
        assert!(Plugin::parse("").is_err());
        assert!(Plugin::parse("/does/not/exist.so").unwrap_err().contains("/does/not/exist.so"));
        assert!(Plugin::parse("/").unwrap_err().contains("is no file"));
        let own = std::env::current_exe().unwrap();
        assert!(matches!(Plugin::parse(own.to_str().unwrap()), Ok(Plugin::File(_))));
    }

    #[test]
    fn each_side_asks_for_its_network_by_name_where_it_can() {
        let of = |plugin, name: &str| side(plugin).environment.get(name).cloned();
        let set = |text: &str| Some(Some(text.to_owned()));
        assert_eq!(of(Plugin::None, "NCCL_NET"), set("IB"));
        assert_eq!(of(Plugin::None, "NCCL_NET_PLUGIN"), set("none"));
        assert_eq!(of(Plugin::Name("pinrail".into()), "NCCL_NET"), set("pinrail"));
        assert_eq!(
            of(Plugin::File("/x/libnccl-net-pinrail.so".into()), "NCCL_NET"),
            set("pinrail")
        );
        assert_eq!(of(Plugin::Name("ofi".into()), "NCCL_NET"), Some(None), "removed");
        assert_eq!(of(Plugin::None, "NCCL_DEBUG"), set("INFO"));
        let given = [("NCCL_NET".to_owned(), "Socket".to_owned())];
        let own = Side::new("A", Plugin::None, &given, |name| {
            (name == "NCCL_DEBUG").then(|| "TRACE".to_owned())
        });
        assert_eq!(own.environment.get("NCCL_DEBUG"), None, "the user's stays");
        assert_eq!(own.wanted(), Some("Socket"), "the user's wins");
    }

    #[test]
    fn the_log_says_whether_the_right_network_was_used() {
        let (none, pinrail) = (side(Plugin::None), side(Plugin::Name("pinrail".into())));
        let other = side(Plugin::Name("ofi".into()));
        assert_eq!(none.used(&log(IB)), Used::Right("IB".into()));
        // Names may have blanks.
        assert_eq!(
            other.used(&log(&IB.replace("IB", "AWS Libfabric"))),
            Used::Right("AWS Libfabric".into())
        );
        for (side, text, part) in [
            (&pinrail, IB.to_owned(), "network IB was used, not pinrail"),
            (&none, IB.replace("IB", "Socket"), "network Socket was used, not IB"),
            (&other, IB.to_owned(), "network IB was used, not ofi"),
            (
                &pinrail,
                format!("{IB}n2:1:2 [0] NCCL INFO Using network pinrail\n"),
                "different networks: IB, pinrail",
            ),
        ] {
            let Used::Wrong(why) = side.used(&log(&text)) else { panic!("{text}") };
            assert!(why.contains(part), "{why}");
        }
        for (text, part) in [
            ("", "no line of NCCL's log"),
            ("n1:1:2 [0] NCCL WARN x", "names a network"),
            (
                "n1:1:2 [0] NCCL INFO Using network IB\nx NCCL INFO Channel 0 : 0 -> 1 via P2P/IPC\n",
                "NCCL_SHM_DISABLE=1",
            ),
        ] {
            let Used::Unknown(why) = none.used(&log(text)) else { panic!("{text}") };
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn a_heading_tells_sides_of_one_file_apart() {
        let file = || Plugin::File("/opt/x/libnccl-net-pinrail.so".into());
        let given = [("NCCL_IB_TC".to_owned(), "106".to_owned())];
        let b = Side::new("B", file(), &given, |_| None);
        assert_eq!(side(file()).short(), "libnccl-net-pinrail.so");
        assert_eq!(b.short(), "libnccl-net-pinrail.so with NCCL_IB_TC=106");
    }

    #[test]
    fn only_variables_that_differ_are_shown() {
        let given = [("NCCL_IB_TC".to_owned(), "106".to_owned())];
        let a = side(Plugin::None);
        let b = Side::new("B", Plugin::Name("pinrail".into()), &given, |_| None);
        let names: Vec<_> = differences(&a, &b).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["NCCL_IB_TC", "NCCL_NET", "NCCL_NET_PLUGIN"]);
    }
}
