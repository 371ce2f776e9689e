//! The same as numbers for Prometheus, in its text format (version 0.0.4).

use super::port::Counters;
use super::process::Process;
use nccl_net_pinrail::memory::diagnosis::Direction;
use nccl_net_pinrail::memory::status::layout::bound;
use nccl_net_pinrail::memory::status::reader::Latency;
use nccl_net_pinrail::memory::status::{End, Status, Wait};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Upper bounds of a latency's buckets, in seconds. Fixed, as a scraper must find the same ones each time.
const BOUNDS: [(&str, f64); 19] = [
    ("1e-06", 1e-6),
    ("2e-06", 2e-6),
    ("5e-06", 5e-6),
    ("1e-05", 1e-5),
    ("2e-05", 2e-5),
    ("5e-05", 5e-5),
    ("0.0001", 1e-4),
    ("0.0002", 2e-4),
    ("0.0005", 5e-4),
    ("0.001", 1e-3),
    ("0.002", 2e-3),
    ("0.005", 5e-3),
    ("0.01", 1e-2),
    ("0.02", 2e-2),
    ("0.05", 5e-2),
    ("0.1", 0.1),
    ("0.2", 0.2),
    ("0.5", 0.5),
    ("1", 1.0),
];

/// The lines of all metrics.
struct Page(String);

/// Labels of a sample: names and values.
type Labels<'a> = Vec<(&'a str, String)>;

/// All metrics of some processes.
pub fn page(processes: &[Process], ports: &BTreeMap<String, Counters>) -> String {
    let mut page = Page(String::new());
    let all: Vec<(u32, &Status)> =
        processes.iter().filter_map(|process| Some((process.pid, process.status()?))).collect();
    page.of_processes(&all);
    page.of_ends(&all);
    page.of_rails(&all);
    page.latencies(&all);
    page.of_ports(ports);
    page.0
}

/// Text of a label as the format wants it.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn of_end(pid: u32, end: &End) -> Labels<'static> {
    vec![
        ("pid", pid.to_string()),
        ("end", end.number.to_string()),
        ("direction", end.direction.word().into()),
        ("communicator", end.comm.map_or_else(String::new, |id| format!("{id:#x}"))),
        ("peer_host", end.peer_host.clone()),
        ("peer_pid", end.peer_pid.to_string()),
        ("peer_device", end.peer_device.clone()),
    ]
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &Labels<'_>, value: impl std::fmt::Display) {
        let labels: Vec<_> =
            labels.iter().map(|(name, text)| format!("{name}=\"{}\"", escaped(text))).collect();
        let _ = writeln!(self.0, "{name}{{{}}} {value}", labels.join(","));
    }

    fn of_processes(&mut self, all: &[(u32, &Status)]) {
        type Get = fn(&Status) -> f64;
        let families: [(&str, &str, &str, Get); 5] = [
            (
                "pinrail_ends_opened_total",
                "counter",
                "Ends of connections that became ready.",
                |s| s.opened as f64,
            ),
            ("pinrail_ends_failed_total", "counter", "Ends of connections that failed.", |s| {
                s.failed as f64
            }),
            ("pinrail_ends", "gauge", "Ends of connections that are open.", |s| {
                s.ends.len() as f64
            }),
            (
                "pinrail_ends_not_shown",
                "gauge",
                "Ends that found no room in the file, or could not be read.",
                |s| s.left_out as f64 + s.unsteady as f64,
            ),
            ("pinrail_bounce_set_aside_bytes", "gauge", "Memory pinned for copies.", |s| {
                s.aside as f64
            }),
        ];
        for (name, kind, help, get) in families {
            self.family(name, kind, help);
            for (pid, status) in all {
                self.sample(name, &vec![("pid", pid.to_string())], get(status));
            }
        }
        let closed = [("messages", 0, "Messages"), ("bytes", 1, "Bytes")];
        for (what, offset, title) in closed {
            let name = format!("pinrail_closed_{what}_total");
            self.family(&name, "counter", &format!("{title} that ends moved which are closed."));
            for (pid, status) in all {
                for (first, direction) in [(0, Direction::Send), (2, Direction::Receive)] {
                    let labels =
                        vec![("pid", pid.to_string()), ("direction", direction.word().into())];
                    self.sample(&name, &labels, status.closed[first + offset]);
                }
            }
        }
    }

    fn of_ends(&mut self, all: &[(u32, &Status)]) {
        type Get = fn(&End) -> u64;
        let families: [(&str, &str, &str, Get); 13] = [
            ("pinrail_messages_total", "counter", "Messages that were begun.", |e| e.messages),
            (
                "pinrail_bytes_total",
                "counter",
                "Bytes of messages: begun by a sender, arrived at a receiver.",
                |e| e.bytes,
            ),
            (
                "pinrail_receives_posted_total",
                "counter",
                "Receives that were answered or advertised.",
                |e| e.receives,
            ),
            (
                "pinrail_receives_completed_total",
                "counter",
                "Those of them that are complete.",
                |e| e.completed,
            ),
            (
                "pinrail_sent_again_total",
                "counter",
                "Parts and credits that went again over another rail.",
                |e| e.again,
            ),
            (
                "pinrail_shortened_total",
                "counter",
                "Sends that were longer than the receive.",
                |e| e.shortened,
            ),
            ("pinrail_flushes_total", "counter", "Flushes by reads that were begun.", |e| {
                e.flushes
            }),
            (
                "pinrail_flushes_completed_total",
                "counter",
                "Those of them that are complete.",
                |e| e.flushed,
            ),
            ("pinrail_copied_bytes_total", "counter", "Bytes that went through copies.", |e| {
                e.copied_bytes
            }),
            ("pinrail_registered_bytes", "gauge", "Memory that devices reach directly.", |e| {
                e.registered_bytes
            }),
            ("pinrail_registered_handles", "gauge", "Handles of such memory.", |e| e.registered),
            ("pinrail_bounced_bytes", "gauge", "Memory that is reached through copies.", |e| {
                e.bounced_bytes
            }),
            ("pinrail_failed", "gauge", "1: the connection failed or lost its peer.", |e| {
                u64::from(e.is_over() && !e.is_closed())
            }),
        ];
        for (name, kind, help, get) in families {
            self.family(name, kind, help);
            for (pid, end) in ends(all) {
                self.sample(name, &of_end(pid, end), get(end));
            }
        }
        let name = "pinrail_waiting_seconds";
        self.family(
            name,
            "gauge",
            "Time without progress while the end waits, seen once a second.",
        );
        for (pid, status) in all {
            for end in &status.ends {
                for wait in [Wait::Credit, Wait::Completion, Wait::Flush] {
                    let mut labels = of_end(*pid, end);
                    labels.push(("for", wait.name().into()));
                    let nanos = status.waited(end).filter(|_| end.wait == wait).unwrap_or(0);
                    self.sample(name, &labels, nanos as f64 / 1e9);
                }
            }
        }
    }

    fn of_rails(&mut self, all: &[(u32, &Status)]) {
        let labels = |pid, end, rail: &str| {
            let mut labels = of_end(pid, end);
            labels.push(("device", rail.to_owned()));
            labels
        };
        let name = "pinrail_rail_bytes_total";
        self.family(name, "counter", "Bytes of messages by rail.");
        for (pid, end) in ends(all) {
            for rail in &end.rails {
                if let Some(bytes) = rail.bytes {
                    self.sample(name, &labels(pid, end, &rail.name), bytes);
                }
            }
        }
        let name = "pinrail_rail_posts_total";
        self.family(name, "counter", "Work requests by rail, flushes left out.");
        for (pid, end) in ends(all) {
            for rail in &end.rails {
                self.sample(name, &labels(pid, end, &rail.name), rail.posts);
            }
        }
        let name = "pinrail_rail_queue_pairs_given_up";
        self.family(name, "gauge", "Queue pairs that failed and are not used any more.");
        for (pid, end) in ends(all) {
            for rail in &end.rails {
                self.sample(name, &labels(pid, end, &rail.name), rail.stopped);
            }
        }
    }

    fn of_ports(&mut self, ports: &BTreeMap<String, Counters>) {
        let name = "pinrail_port_errors_total";
        self.family(
            name,
            "counter",
            "What the kernel counts at ports in use, for all their users.",
        );
        for (port, counters) in ports {
            for (counter, count) in counters {
                let labels = vec![("device", port.clone()), ("counter", (*counter).into())];
                self.sample(name, &labels, count);
            }
        }
    }

    fn latencies(&mut self, all: &[(u32, &Status)]) {
        let name = "pinrail_latency_seconds";
        self.family(name, "histogram", "Latencies of one in 64 messages, by stage.");
        for (pid, status) in all {
            let Some(pace) = status.ticks_per_second else { continue };
            for end in &status.ends {
                for latency in end.latencies.iter().filter(|latency| latency.count() > 0) {
                    let mut labels = of_end(*pid, end);
                    labels.push(("stage", latency.stage.name().into()));
                    self.histogram(name, &labels, latency, pace);
                }
            }
        }
    }

    fn histogram(&mut self, name: &str, labels: &Labels<'_>, latency: &Latency, pace: f64) {
        for (text, most) in BOUNDS {
            // A bucket that ends beyond the bound is counted with the next. The last has no end.
            let inside = latency.buckets[..latency.buckets.len() - 1].iter().enumerate();
            let inside = inside.filter(|(at, _)| bound(*at) as f64 / pace <= most);
            let count = inside.fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
            let mut labels = labels.clone();
            labels.push(("le", text.into()));
            self.sample(&format!("{name}_bucket"), &labels, count);
        }
        let mut all = labels.clone();
        all.push(("le", "+Inf".into()));
        self.sample(&format!("{name}_bucket"), &all, latency.count());
        self.sample(&format!("{name}_sum"), labels, latency.sum as f64 / pace);
        self.sample(&format!("{name}_count"), labels, latency.count());
    }
}

fn ends<'a>(all: &'a [(u32, &'a Status)]) -> impl Iterator<Item = (u32, &'a End)> {
    all.iter().flat_map(|(pid, status)| status.ends.iter().map(|end| (*pid, end)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_net_pinrail::memory::status::Stage;

    #[test]
    fn labels_are_escaped() {
        let mut page = Page(String::new());
        page.sample("x", &vec![("a", "q\"b\\s\nn".into()), ("b", "2".into())], 1);
        assert_eq!(page.0, "x{a=\"q\\\"b\\\\s\\nn\",b=\"2\"} 1\n");
    }

    #[test]
    fn histograms_rise_to_their_count() {
        let mut buckets = vec![0; 104];
        (buckets[0], buckets[60], buckets[103]) = (1, 2, 3);
        let latency = Latency { stage: Stage::Test, buckets, sum: 4000, most: u64::MAX };
        let mut page = Page(String::new());
        // Ticks are nanoseconds: bucket 60 ends at 640 microseconds.
        page.histogram("h", &vec![], &latency, 1e9);
        let counts: Vec<u64> = page
            .0
            .lines()
            .filter(|line| line.starts_with("h_bucket"))
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(counts.len(), BOUNDS.len() + 1);
        assert!(counts.is_sorted());
        assert_eq!((counts[0], counts[8], counts[9], counts[19]), (1, 1, 3, 6));
        assert!(page.0.contains("h_sum{} 0.000004\n") && page.0.ends_with("h_count{} 6\n"));
    }
}
