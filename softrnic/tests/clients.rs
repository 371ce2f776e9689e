//! Stock clients, unchanged, on the software RNIC: the acceptance tests.

mod common;

use std::time::{Duration, Instant};

use common::{Guarded, client, fabric, finish, pair};

#[test]
fn devinfo_lists_an_active_port() {
    let mut command = client("ibv_devinfo", &fabric("devinfo"));
    let child = Guarded(command.arg("-v").spawn().expect("ibv_devinfo starts"));
    let (ok, text) = finish(child, Instant::now() + Duration::from_secs(60));
    assert!(ok, "{text}");
    for wanted in [
        "hca_id:\tsoftrnic0",
        "PORT_ACTIVE (4)",
        "max_mtu:\t\t4096 (5)",
        "::ffff:192.168.77.1, RoCE v2",
    ] {
        assert!(text.contains(wanted), "{wanted:?} missing in\n{text}");
    }
}

#[test]
fn devinfo_follows_the_settings() {
    let mut command = client("ibv_devinfo", &fabric("devinfo"));
    let env = [
        ("SOFTRNIC_DEVICES", "2"),
        ("SOFTRNIC_PORTS", "2"),
        ("SOFTRNIC_LINK", "ib"),
        ("SOFTRNIC_NAME", "mlx5_"),
    ];
    let child = Guarded(command.arg("-v").envs(env).spawn().expect("ibv_devinfo starts"));
    let (ok, text) = finish(child, Instant::now() + Duration::from_secs(60));
    assert!(ok, "{text}");
    assert_eq!(text.matches("hca_id:\tmlx5_").count(), 2, "{text}");
    assert_eq!(text.matches("link_layer:\t\tInfiniBand").count(), 4, "{text}");
}

fn pingpong(args: &[&str], env: &[(&str, &str)]) {
    let (text, _) = pair("ibv_rc_pingpong", args, env);
    assert!(text.contains("1000 iters in"), "{text}");
}

#[test]
fn rc_pingpong() {
    pingpong(&["-g", "0"], &[]);
}

#[test]
fn rc_pingpong_with_events_and_data_check() {
    pingpong(&["-g", "0", "-e", "-c"], &[]);
}

#[test]
fn rc_pingpong_on_infiniband_with_lids() {
    pingpong(&["-c"], &[("SOFTRNIC_LINK", "ib")]);
}

/// Rows of the result table of a perftest bandwidth run.
fn rows(text: &str) -> Vec<Vec<f64>> {
    let numbers =
        |line: &str| line.split_whitespace().map(|w| w.parse().ok()).collect::<Option<Vec<f64>>>();
    text.lines().filter_map(numbers).filter(|row| row.len() >= 4).collect()
}

fn bandwidth(program: &str, args: &[&str], sizes: usize) {
    let (text, _) = pair(program, args, &[]);
    let rows = rows(&text);
    assert_eq!(rows.len(), sizes, "{text}");
    assert!(rows.iter().all(|row| row[3] > 0.0), "{text}");
}

#[test]
fn write_bw_all_sizes() {
    bandwidth("ib_write_bw", &["-a", "-n", "200"], 23);
}

#[test]
fn write_bw_four_qps() {
    bandwidth("ib_write_bw", &["-q", "4", "-n", "500"], 1);
}

#[test]
fn read_bw() {
    bandwidth("ib_read_bw", &["-n", "500"], 1);
}

#[test]
fn send_bw() {
    bandwidth("ib_send_bw", &["-n", "500"], 1);
}

#[test]
fn send_bw_through_a_shared_receive_queue() {
    bandwidth("ib_send_bw", &["-n", "500", "--use-srq"], 1);
}

#[test]
fn send_bw_with_events() {
    bandwidth("ib_send_bw", &["-n", "500", "-e"], 1);
}

#[test]
fn atomic_bw() {
    bandwidth("ib_atomic_bw", &["-n", "500"], 1);
    bandwidth("ib_atomic_bw", &["-n", "500", "-A", "CMP_AND_SWAP"], 1);
}

#[test]
fn write_lat() {
    bandwidth("ib_write_lat", &["-n", "500"], 1);
}

#[test]
fn read_lat() {
    bandwidth("ib_read_lat", &["-n", "500"], 1);
}
