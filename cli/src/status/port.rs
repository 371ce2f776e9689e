//! What the kernel counts at the ports that connections use: what adapters repeat by themselves, no plugin sees.
//!
//! These are sums over all users of a port since the machine started, or the driver was loaded.

use super::process::Process;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Counters that tell of packets that were lost, repeated or refused; which of them there are depends on the driver.
const COUNTERS: [&str; 9] = [
    "local_ack_timeout_err",
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
    "roce_adp_retrans",
    "req_remote_access_errors",
    "req_cqe_error",
];

/// The counters of one port, by name.
pub type Counters = BTreeMap<&'static str, u64>;

/// The ports that these processes use and the kernel counts at, by their names.
pub fn of_processes(processes: &[Process]) -> BTreeMap<String, Counters> {
    let ends = processes.iter().filter_map(Process::status).flat_map(|status| &status.ends);
    let names: BTreeSet<_> = ends.flat_map(|end| &end.rails).map(|rail| &*rail.name).collect();
    let read = |name: &str| Some((name.to_owned(), read(Path::new("/sys"), name)?));
    names.into_iter().filter_map(read).collect()
}

/// The counters of the port `device:port`. `None`: the kernel has none, or it is no such name.
fn read(sysfs: &Path, name: &str) -> Option<Counters> {
    let (device, port) = name.rsplit_once(':')?;
    // It comes from another process and becomes part of a path.
    let plain = |text: &str| {
        let sound = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        !text.is_empty() && !text.starts_with('.') && text.chars().all(sound)
    };
    if !plain(device) || !plain(port) {
        return None;
    }
    let folder =
        sysfs.join("class/infiniband").join(device).join("ports").join(port).join("hw_counters");
    let count = |counter: &'static str| {
        let text = std::fs::read_to_string(folder.join(counter)).ok()?;
        Some((counter, text.trim().parse().ok()?))
    };
    let counters: Counters = COUNTERS.into_iter().filter_map(count).collect();
    (!counters.is_empty()).then_some(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_and_strange_names_are_not() {
        let root = std::env::temp_dir().join(format!("pinrail-ports-{}", std::process::id()));
        let folder = root.join("class/infiniband/mlx5_0/ports/1/hw_counters");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("out_of_sequence"), "12\n").unwrap();
        std::fs::write(folder.join("rnr_nak_retry_err"), "not a number\n").unwrap();
        std::fs::write(folder.join("lifespan"), "10\n").unwrap();
        assert_eq!(read(&root, "mlx5_0:1"), Some(Counters::from([("out_of_sequence", 12)])));
        for other in ["mlx5_0:2", "mlx5_0", "", ":", "../mlx5_0:1", "mlx5_0:../1", "a/b:1"] {
            assert_eq!(read(&root, other), None, "{other}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
