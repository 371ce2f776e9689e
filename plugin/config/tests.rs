//! Tests of the table as a whole.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn parse(variables: &[(&str, &str)]) -> (Settings, Vec<Notice>) {
    Settings::parse(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

/// The only notice of a single setting.
fn notice(name: &str, value: &str) -> Notice {
    let (_, notices) = parse(&[(name, value)]);
    assert_eq!(notices.len(), 1, "{name}={value}: {notices:?}");
    notices.into_iter().next().unwrap()
}

#[test]
fn every_default_is_a_value_of_its_own_setting() {
    let defaults = Settings::default();
    for row in TABLE {
        assert_eq!(defaults.shown(row.name).as_deref(), Some(row.default), "{}", row.name);
        if !row.default.is_empty() {
            let (settings, notices) = parse(&[(row.name, row.default)]);
            assert!(notices.is_empty(), "{}: {notices:?}", row.name);
            assert_eq!(Settings { given: Vec::new(), ..settings }, defaults, "{}", row.name);
        }
        if let Some(stock) = row.stock_default {
            assert!(parse(&[(row.name, stock)]).1.is_empty(), "{}", row.name);
        }
    }
}

#[test]
fn every_name_is_declared_once_and_has_prose() {
    let mut names = HashSet::new();
    for name in known_names() {
        assert!(names.insert(name), "{name} twice");
        assert!(relevant(name), "{name}");
    }
    for row in TABLE {
        assert!(row.prose.trim().ends_with('.'), "{}", row.name);
    }
}

#[test]
fn stock_defaults() {
    let s = Settings::default();
    assert_eq!((s.timeout, s.retry_cnt, s.ar_threshold), (20, 7, 8192));
    assert_eq!((s.qps_per_connection, s.split_data_on_qps, s.adaptive_routing), (1, false, None));
    assert_eq!((s.sl, s.tc, s.fifo_tc, s.pkey_index, s.pkey_value), (None, None, None, 0, None));
    assert_eq!((s.gid_index.clone(), s.flid_gid_index), (GidIndex::Automatic, 1));
    assert_eq!((s.addr_family, s.roce_version, s.addr_range), (Family::V4, 2, None));
    assert_eq!(s.relaxed_ordering, RelaxedOrdering::Auto);
    assert_eq!((s.mqp_retry_cnt, s.mqp_retry_sleep), (34, Duration::from_millis(100)));
    assert_eq!((s.socket_retry_cnt, s.socket_retry_sleep), (34, Duration::from_millis(100)));
    assert_eq!((s.connect_timeout, s.flush), (Duration::from_secs(60), FlushPolicy::Auto));
    assert!(s.use_inline && s.ece_enable && s.merge_vfs && s.merge_nics && s.device_pci_order);
    assert!(s.return_async_events && s.query_port_speed);
    assert!(!s.ib_disable && !s.gdr_flush_disable && !s.warn_rail_local);
    assert!(s.socket_ifname.is_automatic() && s.hca.entries.is_empty() && s.verbs_lib.is_none());
}

/// Every variable of the stock transport and of what surrounds it, with the default that NCCL 2.30.7 has, or the first
/// release that has the variable at all.
const STOCK: &[(&str, &str)] = &[
    ("NCCL_IB_DISABLE", "0"),
    ("NCCL_IB_HCA", ""),
    ("NCCL_IBVERBS_LIB", ""),
    ("NCCL_IB_TIMEOUT", "20"),
    ("NCCL_IB_RETRY_CNT", "7"),
    ("NCCL_IB_GID_INDEX", "-1"),
    ("NCCL_IB_ROUTABLE_FLID_GID_INDEX", "1"),
    ("NCCL_IB_ADDR_FAMILY", "AF_INET"),
    ("NCCL_IB_ADDR_RANGE", ""),
    ("NCCL_IB_ROCE_VERSION_NUM", "2"),
    ("NCCL_IB_SL", "-1"),
    ("NCCL_IB_TC", "-1"),
    ("NCCL_IB_FIFO_TC", "-1"),
    ("NCCL_IB_PKEY", "0"),
    ("NCCL_IB_PKEY_VALUE", "-1"),
    ("NCCL_IB_USE_INLINE", "0"),
    ("NCCL_IB_ECE_ENABLE", "1"),
    ("NCCL_IB_QPS_PER_CONNECTION", "1"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", "0"),
    ("NCCL_IB_AR_THRESHOLD", "8192"),
    ("NCCL_IB_ADAPTIVE_ROUTING", "-2"),
    ("NCCL_IB_PCI_RELAXED_ORDERING", "2"),
    ("NCCL_IB_MERGE_VFS", "1"),
    ("NCCL_IB_MERGE_NICS", "1"),
    ("NCCL_IB_DEVICE_PCI_ORDER", "1"),
    ("NCCL_IB_DATA_DIRECT", "1"),
    ("NCCL_IB_OOO_RQ", "0"),
    ("NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS", "-2"),
    ("NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", "-2"),
    ("NCCL_IB_RETURN_ASYNC_EVENTS", "1"),
    ("NCCL_IB_WARN_RAIL_LOCAL", "0"),
    ("NCCL_IB_SUBNET_AWARE_ROUTING", "0"),
    ("NCCL_IB_SUBNET_PREFIX_LEN", "24"),
    ("NCCL_IB_QUERY_PORT_SPEED", "1"),
    ("NCCL_IB_MQP_RETRY_ALL", "0"),
    ("NCCL_IB_MQP_RETRY_CNT", "34"),
    ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "100"),
    ("NCCL_IB_RESILIENCY_PORT_FAILOVER", "0"),
    ("NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS", "1"),
    ("NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY", "10"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY", "0"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY", "200"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL", "500"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE", "5"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE", "5"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT", "4000"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT", "5000"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX", "5"),
    ("NCCL_GDR_FLUSH_DISABLE", "0"),
    ("NCCL_GIN_IB_TC", "-1"),
    ("NCCL_GIN_TYPE", "-1"),
    ("NCCL_NET", ""),
    ("NCCL_NET_PLUGIN", ""),
    ("NCCL_NET_PLUGIN_REF_COUNT", "0"),
    ("NCCL_NET_MERGE_LEVEL", "PORT"),
    ("NCCL_NET_FORCE_MERGE", ""),
    ("NCCL_NET_MERGE_POLICY", "ALL"),
    ("NCCL_NET_GDR_LEVEL", ""),
    ("NCCL_NET_GDR_READ", "-2"),
    ("NCCL_NET_GDR_C2C", "1"),
    ("NCCL_NET_GDR_MLOPART", "0"),
    ("NCCL_NET_FORCE_FLUSH", "0"),
    ("NCCL_NET_SHARED_BUFFERS", "-2"),
    ("NCCL_NET_SHARED_COMMS", "1"),
    ("NCCL_NET_OPTIONAL_RECV_COMPLETION", "1"),
    ("NCCL_NET_OVERHEAD", "-2"),
    ("NCCL_NET_DISABLE_INTRA", "0"),
    ("NCCL_IGNORE_NET_MISMATCH", "1"),
    ("NCCL_DMABUF_ENABLE", "1"),
    ("NCCL_OOB_NET_ENABLE", "0"),
    ("NCCL_OOB_NET_IFNAME", ""),
    ("NCCL_SOCKET_IFNAME", ""),
    ("NCCL_SOCKET_FAMILY", ""),
    ("NCCL_SOCKET_MAGIC", ""),
    ("NCCL_SOCKET_RETRY_CNT", "34"),
    ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "100"),
    ("NCCL_SOCKET_POLL_TIMEOUT_MSEC", "0"),
    ("NCCL_SOCKET_RCVBUF", "-1"),
    ("NCCL_SOCKET_SNDBUF", "-1"),
    ("NCCL_SOCKET_NTHREADS", "-2"),
    ("NCCL_NSOCKS_PERTHREAD", "-2"),
    ("NCCL_SOCKET_INLINE", "128"),
    ("NCCL_SOCKET_MIN_TASKSIZE", "65536"),
    ("NCCL_IB_WQE_LATENCY_REPORT", "1"),
    ("NCCL_IB_WQE_LATENCY_THRESHOLD_NS", "0"),
    ("NCCL_IB_EVENT_BASED_LB", "0"),
    ("NCCL_IB_EVENT_BASED_LB_REMOTE", "1"),
    ("NCCL_IB_RAIL_POLICY", ""),
    ("NCCL_IB_SORT_MERGE_NICS", "1"),
    ("NCCL_IB_VR_SOCKET_COUNT", ""),
    ("NCCL_IB_VR_RAILS_PER_SOCKET", ""),
    ("NCCL_RMA_IB_WR_BATCHSIZE", "64"),
];

#[test]
fn every_stock_variable_is_known_with_its_stock_default() {
    for (name, stock) in STOCK {
        let here = TABLE
            .iter()
            .find(|row| row.name == *name)
            .map(|row| row.stock_default.unwrap_or(row.default))
            .or_else(|| INERT.iter().find(|row| row.name == *name).map(|row| row.default));
        assert_eq!(here, Some(*stock), "{name}");
    }
}

#[test]
fn every_stock_variable_without_effect_says_so_when_it_is_set() {
    for inert in INERT {
        let (_, notices) = parse(&[(inert.name, "77")]);
        if inert.core {
            assert!(notices.is_empty(), "{}", inert.name);
        } else {
            let [notice] = &notices[..] else { panic!("{}: {notices:?}", inert.name) };
            assert_eq!(notice.topic, Topic::NotApplicable);
            assert!(notice.text.contains(inert.name) && notice.text.contains(inert.reason));
        }
    }
}

/// Variable, text, effective value.
const VALUES: &[(&str, &str, &str)] = &[
    ("NCCL_IB_DISABLE", "1", "1"),
    ("NCCL_NET", "IB", "IB"),
    ("NCCL_IB_HCA", "^=mlx5_0:1:2:3", "^=mlx5_0:1:2:3"),
    ("NCCL_IBVERBS_LIB", "/opt/libibverbs.so", "/opt/libibverbs.so"),
    ("NCCL_IB_TIMEOUT", "22", "22"),
    ("NCCL_IB_RETRY_CNT", "0", "0"),
    ("NCCL_IB_GID_INDEX", "mlx5_0:3,mlx5_1:1", "mlx5_0:3,mlx5_1:1"),
    ("NCCL_IB_ROUTABLE_FLID_GID_INDEX", "2", "2"),
    ("NCCL_IB_ADDR_FAMILY", "AF_INET6", "AF_INET6"),
    ("NCCL_IB_ADDR_RANGE", "10.0.0.0/8", "10.0.0.0/8"),
    ("NCCL_IB_ROCE_VERSION_NUM", "1", "1"),
    ("NCCL_IB_SL", "3", "3"),
    ("NCCL_IB_TC", "0x6a", "106"),
    ("NCCL_IB_FIFO_TC", "96", "96"),
    ("NCCL_IB_PKEY", "1", "1"),
    ("NCCL_IB_PKEY_VALUE", "0x8001", "32769"),
    ("NCCL_IB_USE_INLINE", "0", "0"),
    ("NCCL_IB_ECE_ENABLE", "0", "0"),
    ("NCCL_IB_QPS_PER_CONNECTION", "4", "4"),
    ("NCCL_IB_SPLIT_DATA_ON_QPS", "1", "1"),
    ("NCCL_IB_AR_THRESHOLD", "65536", "65536"),
    ("NCCL_IB_ADAPTIVE_ROUTING", "1", "1"),
    ("NCCL_IB_PCI_RELAXED_ORDERING", "1", "1"),
    ("NCCL_IB_MERGE_VFS", "0", "0"),
    ("NCCL_IB_MERGE_NICS", "0", "0"),
    ("NCCL_IB_DEVICE_PCI_ORDER", "0", "0"),
    ("NCCL_IB_RETURN_ASYNC_EVENTS", "0", "0"),
    ("NCCL_IB_QUERY_PORT_SPEED", "0", "0"),
    ("NCCL_GDR_FLUSH_DISABLE", "1", "1"),
    ("NCCL_NET_FORCE_FLUSH", "1", "1"),
    ("NCCL_IB_MQP_RETRY_ALL", "1", "1"),
    ("NCCL_IB_MQP_RETRY_CNT", "5", "5"),
    ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "7", "7"),
    ("NCCL_IB_WARN_RAIL_LOCAL", "1", "1"),
    ("NCCL_IB_RESILIENCY_PORT_FAILOVER", "1", "1"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY", "1", "1"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY", "7", "7"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL", "250", "250"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE", "10", "10"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT", "900", "900"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT", "800", "800"),
    ("NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX", "9", "9"),
    ("NCCL_IB_SUBNET_AWARE_ROUTING", "1", "1"),
    ("NCCL_IB_SUBNET_PREFIX_LEN", "16", "16"),
    ("NCCL_SOCKET_IFNAME", "^docker,lo", "^docker,lo"),
    ("NCCL_SOCKET_FAMILY", "AF_INET6", "AF_INET6"),
    ("NCCL_SOCKET_RETRY_CNT", "3", "3"),
    ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "20", "20"),
    ("NCCL_COMM_ID", "10.0.0.1:1234", "10.0.0.1:1234"),
];

#[test]
fn every_stock_variable_with_effect_takes_its_value() {
    for row in TABLE.iter().filter(|row| row.is_stock()) {
        let (_, text, effective) =
            VALUES.iter().find(|(name, ..)| *name == row.name).unwrap_or_else(|| {
                panic!("{} has no line in this test", row.name);
            });
        let (settings, notices) = parse(&[(row.name, text)]);
        assert_eq!(settings.shown(row.name).as_deref(), Some(*effective), "{}", row.name);
        assert!(notices.is_empty(), "{}: {notices:?}", row.name);
        let line = settings.summary();
        assert!(line.contains(&format!("{}={effective} (environment", row.name)), "{line}");
    }
}

#[test]
fn every_number_out_of_range_becomes_the_nearest_bound() {
    let mut rows = 0;
    for row in TABLE {
        let (min, max, least) = match row.form {
            Form::Number { min, max, .. } => (min, max, min),
            // What is below the special number is nearest to it.
            Form::NumberOr { min, max, special, stands_for, .. } => {
                (min, max, stands_for.unwrap_or(special))
            }
            Form::Flag => (0, 1, 0),
            _ => continue,
        };
        rows += 1;
        for (beyond, bound) in [(max.checked_add(1), max), (min.checked_sub(9), least)] {
            let Some(beyond) = beyond else { continue };
            let (settings, notices) = parse(&[(row.name, &beyond.to_string())]);
            let effective = settings.shown(row.name).unwrap();
            let [notice] = &notices[..] else { panic!("{}={beyond}: {notices:?}", row.name) };
            let said = format!("{}={beyond} (environment)", row.name);
            assert!(notice.text.starts_with(&said), "{notice}");
            if notice.topic == Topic::Clamped {
                assert_eq!(effective, bound.to_string(), "{}={beyond}", row.name);
                assert!(notice.text.contains(&format!("using {bound}")), "{notice}");
            } else {
                // A switch that is neither on nor off keeps its default.
                assert_eq!((row.form, effective.as_str()), (Form::Flag, row.default), "{notice}");
            }
        }
    }
    assert!(rows > 25, "{rows}");
}

#[test]
fn values_that_people_set_too_high_are_clamped_with_their_effect() {
    let (settings, notices) = parse(&[("NCCL_IB_TIMEOUT", "300"), ("NCCL_IB_RETRY_CNT", "15")]);
    assert_eq!((settings.timeout, settings.retry_cnt), (31, 7));
    assert_eq!(notices.len(), 2);
    assert!(notices.iter().all(|n| n.topic == Topic::Clamped));
    let text = &notices[0].text;
    for part in ["NCCL_IB_TIMEOUT=300", "(environment)", "0 to 31", "using 31", "8796.093 s"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(notices[1].text.contains("8 attempts"), "{}", notices[1].text);
}

#[test]
fn unreadable_text_leaves_the_default_and_is_quoted() {
    let bad = notice("NCCL_IB_SL", "high\n");
    assert_eq!((bad.topic, bad.severity()), (Topic::Unparsable, Severity::Warn));
    for part in ["NCCL_IB_SL=\"high\\n\"", "0 to 15", "-1 for not set", "default -1"] {
        assert!(bad.text.contains(part), "{bad}");
    }
    assert!(notice("NCCL_IB_DISABLE", "true").text.contains("0 or 1"));
    assert!(notice("NCCL_IB_ADDR_RANGE", "10.0.0.0").text.contains("default, not set"));
    assert!(notice("PINRAIL_FLUSH", "maybe").text.contains("auto, always, never"));
}

#[test]
fn unknown_names_are_reported_with_the_nearest() {
    let bad = notice("NCCL_IB_TIMOUT", "22");
    assert_eq!(bad.topic, Topic::Unknown);
    assert!(bad.text.ends_with("the nearest known name is NCCL_IB_TIMEOUT"), "{bad}");
    assert!(notice("NCCL_SOCKET_IFNAMES", "eth0").text.ends_with("NCCL_SOCKET_IFNAME"));
    assert!(notice("NCCL_GDR_FLUSH_DISABEL", "1").text.ends_with("NCCL_GDR_FLUSH_DISABLE"));
    assert!(notice("PINRAIL_FLUHS", "").text.ends_with("PINRAIL_FLUSH"));
    assert!(notice("NCCL_IB_CUDA_SUPPORT", "1").text.ends_with("no effect"));
    assert!(
        parse(&[("NCCL_ALGO", "Ring"), ("PATH", "x"), ("NCCL_IBEXT_DISABLE", "1")]).1.is_empty()
    );
}

#[test]
fn inert_names_are_noted_unless_the_core_acts_on_them() {
    let inert = notice("NCCL_IB_OOO_RQ", "1");
    assert_eq!((inert.topic, inert.severity()), (Topic::NotApplicable, Severity::Info));
    assert!(parse(&[("NCCL_IB_OOO_RQ", "0"), ("NCCL_NET_GDR_LEVEL", "SYS")]).1.is_empty());
}

#[test]
fn a_range_of_another_family_is_ignored_aloud() {
    let (settings, notices) = parse(&[("NCCL_IB_ADDR_RANGE", "fd00::/8")]);
    assert_eq!((settings.addr_range, notices.len()), (None, 1));
    let both = [("NCCL_IB_ADDR_RANGE", "fd00::/8"), ("NCCL_IB_ADDR_FAMILY", "AF_INET6")];
    assert!(parse(&both).0.addr_range.is_some());
}

#[test]
fn being_asked_for_by_name_wins_over_disable() {
    let off = [("NCCL_IB_DISABLE", "1")];
    assert!(parse(&off).0.disabled());
    assert!(!parse(&[off[0], ("NCCL_NET", "Pinrail")]).0.disabled());
    assert!(parse(&[off[0], ("NCCL_NET", "IB")]).0.disabled());
}

#[test]
fn a_bond_has_a_queue_pair_per_link_unless_told_otherwise() {
    let rows =
        [("", 0, 1), ("", 1, 1), ("", 2, 2), ("", 3, 3), ("", 9, 4), ("1", 2, 1), ("6", 2, 6)];
    for (text, links, wanted) in rows {
        let settings = parse(&[("NCCL_IB_QPS_PER_CONNECTION", text)]).0;
        assert_eq!(settings.qps_per_rail(links), wanted, "{text:?} over {links} links");
    }
}

#[test]
fn minus_two_is_the_stock_threshold() {
    assert_eq!(parse(&[("NCCL_IB_AR_THRESHOLD", "-2")]).0.ar_threshold, 8192);
    assert_eq!(parse(&[("NCCL_IB_AR_THRESHOLD", "-1")]).0.ar_threshold, 0);
}

#[test]
fn the_summary_lists_what_differs_with_its_origin() {
    let line = Settings::default().summary();
    assert!(
        line.starts_with("settings: all default; unlike stock: NCCL_IB_USE_INLINE=1 (stock 0);")
    );
    assert!(line.ends_with("34.4 s"), "{line}");
    let variable = |name: &str, value: &str, origin| Variable {
        name: name.into(),
        value: value.into(),
        origin,
    };
    let (settings, _) = Settings::from_variables([
        variable("NCCL_IB_TIMEOUT", "300", Origin::Environment),
        variable("NCCL_IB_HCA", "=mlx5_0", Origin::File("/etc/nccl.conf".into())),
        variable("NCCL_IB_USE_INLINE", "0", Origin::Environment),
        variable("NCCL_IB_RETRY_CNT", "7", Origin::Environment),
    ]);
    let expected = "settings: NCCL_IB_HCA==mlx5_0 (/etc/nccl.conf), NCCL_IB_TIMEOUT=31 (environment: \
                    300), NCCL_IB_USE_INLINE=0 (environment); unlike stock: nothing; a dead peer";
    let line = settings.summary();
    assert!(line.starts_with(expected), "{line}");
    assert!(!line.contains('\n'));
}

#[test]
fn text_that_is_not_utf8_is_a_path_or_refused() {
    let odd = || OsString::from_vec(vec![b'/', 0xff]);
    let variable =
        |name: &str| Variable { name: name.into(), value: odd(), origin: Origin::Environment };
    let names = ["NCCL_IBVERBS_LIB", "NCCL_IB_HCA", "NCCL_IB_SL"];
    let (settings, notices) = Settings::from_variables(names.map(variable));
    assert_eq!(settings.verbs_lib.unwrap().into_os_string(), odd());
    assert_eq!(notices.len(), 2);
    assert!(notices.iter().all(|notice| notice.topic == Topic::Unparsable));
}

#[test]
fn the_process_can_be_read() {
    let (settings, _) = Settings::from_process();
    assert!(!settings.summary().is_empty());
}

fn any_name() -> impl Strategy<Value = String> {
    let known: Vec<&'static str> = known_names().collect();
    prop_oneof![
        proptest::sample::select(known).prop_map(str::to_owned),
        "NCCL_IB_[A-Z_]{0,20}",
        "PINRAIL_\\PC{0,20}",
        any::<String>(),
    ]
}

fn any_value() -> impl Strategy<Value = OsString> {
    prop_oneof![
        any::<i64>().prop_map(|n| n.to_string().into()),
        (-3i64..300).prop_map(|n| n.to_string().into()),
        "[\\^=]{0,2}[a-z0-9_:,/.-]{0,40}".prop_map(OsString::from),
        any::<String>().prop_map(OsString::from),
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(OsString::from_vec),
    ]
}

proptest! {
    #[test]
    fn any_environment_gives_settings_in_range(
        variables in proptest::collection::vec((any_name(), any_value()), 0..12)
    ) {
        let variables = variables.into_iter().map(|(name, value)| Variable {
            name,
            value,
            origin: Origin::Environment,
        });
        let (s, notices) = Settings::from_variables(variables);
        prop_assert!(s.timeout <= 31 && s.retry_cnt <= 7 && s.sl.is_none_or(|sl| sl <= 15));
        prop_assert!((1..=128).contains(&s.qps_per_connection));
        prop_assert!(s.connect_timeout >= Duration::from_secs(1));
        prop_assert!(!s.summary().chars().any(char::is_control));
        for notice in notices {
            prop_assert!(!notice.text.chars().any(char::is_control), "{}", notice);
        }
    }

    #[test]
    fn the_effective_value_of_any_setting_reads_back(
        row in proptest::sample::select(TABLE),
        value in any_value()
    ) {
        let variable = |value| Variable {
            name: row.name.to_owned(),
            value,
            origin: Origin::Environment,
        };
        let (first, _) = Settings::from_variables([variable(value.clone())]);
        let shown = first.shown(row.name).unwrap();
        if value.to_str().is_some() {
            let (second, _) = Settings::from_variables([variable(shown.clone().into())]);
            prop_assert_eq!(second.shown(row.name).unwrap(), shown);
        }
    }
}

/// Whatever the form: a number that is not used as it is written is told.
#[test]
fn no_number_is_clamped_in_silence() {
    let beyond = ["99999999999999999999", "-99999999999999999999", "0xfffffffffffffffffffff"];
    let mut tried = 0;
    for row in TABLE {
        let own: Vec<String> = match row.form {
            Form::Flag => vec!["2".into(), "-1".into()],
            // One more than the last number, where there is one.
            Form::Number { min, max, .. } => [min.checked_sub(1), max.checked_add(1)]
                .into_iter()
                .flatten()
                .map(|number| number.to_string())
                .collect(),
            Form::NumberOr { special, min, max, .. } => {
                [special.min(min).checked_sub(1), max.checked_add(1)]
                    .into_iter()
                    .flatten()
                    .map(|number| number.to_string())
                    .collect()
            }
            Form::Text(_) if row.name == "NCCL_IB_GID_INDEX" => vec!["-2".into(), "256".into()],
            Form::Text(_) | Form::Words(_) => continue,
        };
        for text in own.iter().map(String::as_str).chain(beyond) {
            let (settings, notices) = Settings::parse([(row.name.to_owned(), text.to_owned())]);
            let told = notices.iter().any(|notice| {
                notice.subject == row.name
                    && matches!(notice.topic, Topic::Clamped | Topic::Unparsable)
            });
            assert!(told, "{}={text} is {:?} in silence", row.name, settings.shown(row.name));
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried}");
}

#[test]
fn a_list_of_nothing_is_told() {
    for name in ["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_IB_GID_INDEX"] {
        for text in [",,,", "=,", ":1", "^", "^=,,"] {
            let (_, notices) = Settings::parse([(name.to_owned(), text.to_owned())]);
            assert!(!notices.is_empty(), "{name}={text}");
        }
    }
    let (_, notices) = Settings::parse([("NCCL_IB_HCA".to_owned(), ",,,".to_owned())]);
    assert!(notices[0].text.contains("names no device, so that all are used"), "{notices:?}");
}
