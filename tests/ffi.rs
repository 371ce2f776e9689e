//! The C tests: programs that open the shipped plugin as NCCL does and drive it on the software RNIC.
//!
//! Each case of each program, in each table version, is a test here. `make` builds what they run on; the programs
//! themselves are built by the first test.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use common::Run;

const VERSIONS: [u32; 7] = [6, 7, 8, 9, 10, 11, 12];

fn run(program: &str, case: &str, version: Option<u32>) {
    let environment =
        if program == "panic" { vec![("FFI_PANIC_PLUGIN", panicking_plugin())] } else { vec![] };
    let deadline = Duration::from_secs(200);
    Run { program, case, version, wrapper: &[], environment: &environment, deadline }
        .expect_success();
}

/// Declares the cases of every program: a test per case and version, and the list that `every_case_is_a_test` checks.
macro_rules! programs {
    ($($program:ident { each: [$($each:ident),* $(,)?], once: [$($once:ident),* $(,)?] })+) => {
        $(mod $program {
            $(mod $each {
                fn run(version: u32) {
                    crate::run(stringify!($program), stringify!($each), Some(version));
                }
                #[test] fn v6() { run(6); }
                #[test] fn v7() { run(7); }
                #[test] fn v8() { run(8); }
                #[test] fn v9() { run(9); }
                #[test] fn v10() { run(10); }
                #[test] fn v11() { run(11); }
                #[test] fn v12() { run(12); }
            })*
            $(#[test] fn $once() { crate::run(stringify!($program), stringify!($once), None); })*
        })+

        /// Program, cases with a version, cases without.
        const PROGRAMS: &[(&str, &[&str], &[&str])] =
            &[$((stringify!($program), &[$(stringify!($each)),*], &[$(stringify!($once)),*])),+];
    };
}

programs! {
    verdicts {
        each: [
            placement,
            memlock,
            placement_under_a_low_limit,
            device_limit,
            kernel_memory,
            nothing_mapped,
            nothing_mapped_and_no_memory,
            read_only,
            peer_memory_missing,
            optional_flags,
            demanded_flags,
            one_line_for_one_cause,
            refused_again_and_again,
            names_the_communicator,
            unwritable_folder,
        ],
        once: []
    }
    load {
        each: [
            table,
            symbol,
            stays_local,
            loaded_twice,
            loading_does_nothing,
            no_verbs_library,
            not_a_verbs_library,
            no_device,
            no_device_passes_the_filter,
            failing_without_a_logger,
            used_before_init,
        ],
        once: [absent_versions]
    }
    init {
        each: [
            without_a_logger,
            several_times,
            counts_devices,
            every_property_is_written,
            properties_are_true,
            strings_stay,
            device_out_of_range,
            null_arguments,
            attributes,
            virtual_devices,
        ],
        once: []
    }
    connect {
        each: [
            another_transports_handle,
            closing_others_meanwhile,
            one_process_one_thread,
            default_interface,
            each_device,
            infiniband_link_layer,
            two_processes,
            any_version_talks_to_any,
            handle_is_128_bytes,
            polls_never_block,
            init_during_an_attempt,
            several_listeners,
            no_device_communicator,
            foreign_handles,
            damaged_handles,
            listener_without_accept,
            listener_closed_half_way,
            strangers_on_the_socket,
        ],
        once: []
    }
    hosts {
        each: [device_by_subnet],
        once: [
            eight_and_three,
            four_in_v9_and_eight,
            one_in_v6_and_four_in_v11,
            two_and_three_with_more_queue_pairs,
            two_and_three_split,
            ports_of_other_numbers,
            two_and_two,
            other_devices_are_told,
            device_by_ipv6_subnet,
            device_by_short_prefix,
            device_as_given,
            no_device_in_the_subnet,
            fused_device_gives_way,
            ports_in_the_order_of_subnets,
            in_two_namespaces,
        ]
    }
    devices {
        each: [
            disabled,
            disabled_but_asked_for,
            an_event_names_its_device,
            init_after_a_failed_init,
            settings_are_told_once,
        ],
        once: [
            filter_grammar,
            pci_paths_ports_and_order,
            speeds_up_to_xdr,
            a_provider_is_missing,
            file_descriptors_are_raised,
        ]
    }
    fabric {
        each: [a_changed_gid_is_followed, traffic_class_of_each_version],
        once: [
            gid_choice,
            ports_of_another_namespace_are_skipped,
            attributes_of_queue_pairs,
            partitions_are_looked_up,
        ]
    }
    service {
        each: [a_flush_queue_pair_is_tried_again, nobody_sleeps_between_attempts],
        once: [
            vendor_options_are_reduced,
            adaptive_routing_splits_above_the_threshold,
            inline_steps_down_to_what_is_granted,
            relaxed_ordering_is_for_bulk_memory,
            failed_moves_are_tried_again,
        ]
    }
    dialling {
        each: [refused_for_a_while, given_up_after_the_count],
        once: [given_up_at_the_deadline, no_such_interface, no_address_of_the_family]
    }
    rails {
        each: [bonds],
        once: [
            two,
            two_in_v9,
            three,
            four_in_v11,
            eight,
            two_with_four_qps_split,
            unequal_ends,
            flush_reads_on_every_rail,
            done_after_all_eight,
            shares_as_fast_as_ports,
            unequal_speeds,
            unequal_speeds_split_in_v9,
            unequal_speeds_with_adaptive_routing,
            completions_of_more_rails_over_there,
            refused_by_a_later_member,
            own_memory_refused_by_a_later_member,
            properties,
            refusals,
            fused_once,
        ]
    }
    transfer {
        each: [
            hello,
            sizes_1_qp,
            sizes_2_qps,
            sizes_4_qps,
            sizes_2_qps_split,
            sizes_4_qps_split,
            sizes_adaptive_routing,
            sizes_without_inline,
            sent_and_asked_differ,
            sent_and_asked_differ_4_qps,
            both_directions,
            any_tag,
        ],
        once: []
    }
    group {
        each: [
            shuffled_1_qp,
            shuffled_4_qps,
            shuffled_2_qps_split,
            shuffled_4_qps_split,
            unwanted_tag_waits,
            same_tag_twice,
            not_done_until_all_came,
            too_many_members,
        ],
        once: []
    }
    inflight {
        each: [
            thirty_two_in_order,
            thirty_two_in_reverse,
            thirty_two_shuffled,
            thirty_two_on_4_qps,
            two_hundred_fifty_six_sends,
            ten_thousand,
            ten_thousand_4_qps,
            ten_thousand_4_qps_split,
            optional_completion_marker,
            marker_and_would_block,
            no_sizes,
            test_before_anything_came,
            one_side_runs_ahead,
        ],
        once: []
    }
    limits {
        each: [
            split_1_qp,
            split_4_qps,
            split_4_qps_and_data,
            split_at_an_odd_limit,
            split_in_a_group,
            split_many_in_flight,
            size_beyond_int,
            receive_beyond_int,
            negative_size,
            small_queues,
        ],
        once: []
    }
    flush {
        each: [
            after_the_sender_closed,
            nothing_to_flush,
            no_sizes,
            one_read_each,
            one_read_for_a_group,
            several_outstanding,
            on_4_qps,
            wrong_calls,
            cuda_type,
            dmabuf,
            dmabuf_with_a_bad_descriptor,
            closed_with_a_flush_outstanding,
            held_then_released,
        ],
        once: []
    }
    register {
        each: [
            stack_and_heap,
            part_of_a_range,
            overlapping_ranges,
            same_range_again_and_again,
            unmapped_and_mapped_again,
            nothing_to_deregister,
            refused_registrations,
            device_refuses,
            during_traffic,
            same_ranges_during_traffic,
            while_another_waits,
        ],
        once: []
    }
    bounce {
        each: [
            hello,
            sizes_send,
            sizes_recv,
            sizes_both,
            any_alignment,
            mixed_groups,
            members_that_overlap,
            outside_the_range,
        ],
        once: [
            four_qps,
            four_qps_in_v9,
            four_qps_split,
            four_qps_split_in_v9,
            adaptive_routing,
            short_device_messages,
            two_rails,
            two_rails_in_v9,
            two_rails_to_one,
            two_rails_to_one_in_v9,
            one_rail_to_two,
            one_rail_to_two_in_v9,
        ]
    }
    bounce_flight {
        each: [
            thirty_two_of_one_buffer,
            mixed_with_direct_ones,
            mixed_with_direct_ones_on_4_qps,
            no_room_for_the_second,
            more_groups_than_room,
            longer_than_all_chunks,
            longer_than_all_chunks_into_copies,
            stream_from_copies,
            stream_into_copies,
            stream_between_copies,
            marker_means_nothing_here,
            flush_reads_no_copies,
        ],
        once: []
    }
    bounce_threads {
        each: [registrations_during_traffic, pairs_of_their_own],
        once: []
    }
    bounce_life {
        each: [
            deregistered_under_a_short_send,
            deregistered_under_a_long_send,
            deregistered_under_a_receive,
            deregistered_in_the_middle_of_a_copy,
            any_order,
            handle_of_another_connection,
            sender_dies_in_the_middle,
            receiver_dies_in_the_middle,
        ],
        once: [twenty_times, twenty_times_in_v9]
    }
    bounce_ahead {
        each: [
            set_aside,
            set_aside_too_little,
            cannot_be_set_aside,
            forbidden,
            little_may_be_locked,
            connect_that_fails,
            set_aside_with_little_left,
            too_large_to_receive,
            large_send_with_little_room,
            too_large_after_others,
            in_the_wrong_place_only,
        ],
        once: [set_aside_with_every_device, machines, slow_registrations]
    }
    hostmem {
        each: [
            any_part_is_registered_already,
            before_init,
            outlives_everything,
            twenty_times,
            freed_while_registered,
            many_threads,
            no_device_and_nccl,
        ],
        once: [
            devices_first_then_the_gpu,
            the_other_order_fails,
            without_a_gpu,
            the_gpu_refuses,
            freed_by_another_thread,
            freed_after_a_reset,
            freed_where_no_context_can_be_had,
            a_device_refuses,
            a_device_without_relaxed_ordering,
            relaxed_ordering_is_demanded,
            sizes_and_huge_pages,
            wrong_arguments,
            wrong_pointers,
            child_of_a_fork_is_refused,
            no_verbs_library,
            no_device,
        ]
    }
    closing {
        each: [
            any_order_when_idle,
            any_order_with_receives_posted,
            any_order_with_requests_untested,
            any_order_with_sends_held,
            held_sends_released_one_by_one,
            sender_closes_first,
            receiver_closes_first,
        ],
        once: []
    }
    killed {
        each: [
            sender_dies_idle,
            sender_dies_after_one_message,
            sender_dies_with_a_send_under_way,
            receiver_dies_before_any_receive,
            receiver_dies_with_receives_posted,
            receiver_dies_with_sends_under_way,
            listener_dies_before_connect,
            listener_dies_half_way,
            connector_dies_half_way,
        ],
        once: []
    }
    stages {
        each: [
            connector_dies_after_each_call,
            acceptor_dies_after_each_call,
            sender_dies_before_a_credit,
            sender_dies_with_a_credit,
            sender_dies_in_a_write,
            receiver_dies_in_a_write,
            sender_dies_before_the_test,
            receiver_dies_before_the_test,
            sender_dies_in_a_flush,
            receiver_dies_in_a_flush,
            sender_dies_in_its_close,
            closed_while_the_peer_is_stopped,
        ],
        once: []
    }
    errors {
        each: [
            communicators_confused,
            out_pointers_missing,
            done_pointer_missing,
            no_memory_handle,
            request_tested_again,
            sent_from_unregistered_memory,
            sent_past_the_registration,
            received_into_unregistered_memory,
            deregistered_under_a_receive,
            failed_sender_stays_failed,
            failed_receiver_stays_failed,
            others_are_not_touched,
            child_of_a_fork_is_refused,
            child_of_a_fork_ends,
        ],
        once: []
    }
    fork {
        each: [
            old_kernel,
            old_library,
            nothing_is_withheld_without_need,
            copies_on_an_old_kernel,
            copies_with_an_old_library,
            planted_on_an_old_kernel,
        ],
        once: [
            planted_with_an_old_library,
            transparent_huge_pages,
            another_allocator,
            a_hundred_communicators,
            registered_all_the_same,
            no_copies_are_allowed,
            no_room_for_copies,
            check_beside_threads,
            no_check_where_a_fork_harms,
            policies,
            armed_by_somebody_else,
            armed_too_late,
        ]
    }
    fork_calls {
        each: [
            every_call_is_refused,
            seen_complete_before,
            children_live,
            forks_beside_threads,
        ],
        once: []
    }
    deadlines {
        each: [
            first_receive_never_comes,
            first_receive_comes_late,
            nobody_asks_and_nobody_minds,
            the_age_is_told,
            a_lost_credit_that_nobody_asks_for,
        ],
        once: [no_answer_about_a_rail]
    }
    exhaustion {
        each: [
            depths_step_down,
            small_queues_carry_every_kind,
            each_call_fails_once,
            a_call_fails_for_good,
            no_more_queue_pairs,
            no_more_completion_queues,
            starved,
            accept_waits_for_descriptors,
            connect_waits_for_descriptors,
            the_deadline_names_the_limit,
        ],
        once: []
    }
    failover {
        each: [],
        once: [
            first_of_two,
            second_of_two,
            one_of_four,
            several_members,
            one_after_another,
            plans_on_two,
            plans_on_four,
            plans_on_a_thread,
            none_left,
            not_asked_for,
            nobody_at_home,
            one_end_asks,
            killed_when_asked,
            sender_closes_first,
            receiver_closes_first,
            flush_queue_pair,
            optional_receives,
            pieces_wait,
        ]
    }
    recovery {
        each: [],
        once: [
            first_of_two,
            second_of_two,
            one_of_four,
            several_members,
            without_failover,
            by_turns,
            all_but_one,
            unequal_ends,
            dead_for_a_while,
            given_up,
            moves_fail,
            fails_at_once,
            another_address,
            closed_on_the_way,
            flush_queue_pair,
            plans_on_two,
            plans_on_four,
            plans_on_a_thread,
            plans_by_steps,
            plans_in_pieces,
            two_hosts,
            killed_on_the_way,
            two_hosts_by_plans,
            one_end_asks,
        ]
    }
    profiler {
        each: [
            one_of_each,
            on_the_second_device,
            adaptive_routing,
            longer_than_a_work_request,
            four_qps_in_turn,
            four_qps_split,
            group,
            group_on_4_qps_split,
            without_parents,
            nobody_listens,
            asked_always,
            asked_never,
            early_completion,
            held_then_released,
            closed_under_way,
            failed,
            forked_under_way,
            of_its_own_communicator,
            without_a_callback,
        ],
        once: []
    }
    gpu {
        each: [
            pointer_kinds,
            dmabufs_not_supported,
            dmabufs_unknown_to_the_kernel,
            each_device_for_itself,
            forced_flush,
            data_direct,
            dmabuf_offsets,
            dmabuf_out_of_step,
            dmabuf_identity,
            flushed_by_the_driver,
            driver_does_not_flush,
            driver_does_not_offer_it,
            asked_for_without_a_driver,
            flushed_by_reads,
        ],
        once: [one_member_refuses, flushed_on_every_member, flushed_once_for_all_members]
    }
    failures {
        each: [one_reason_for_all, no_answer],
        once: []
    }
    breaks {
        each: [
            statuses,
            receivers,
            lost,
            queue_pairs_die,
            completion_queues_overrun,
            port_goes_down,
            device_dies,
            port_returns_in_time,
            port_returns_too_late,
            address_changes,
            address_changes_while_connecting,
            who_waits_hears_of_it,
            fatal_events_are_only_told,
            corruption_arrives,
            disorder,
            by_chance_at_once,
            by_chance_in_steps,
            by_chance_on_a_thread,
        ],
        once: []
    }
    soak {
        each: [],
        once: [seeds, same_run]
    }
    faults {
        each: [registration_fails_while_connecting, user_registration_fails, port_down_and_up],
        once: []
    }
    unload {
        each: [
            with_connections_open,
            twenty_times,
            twenty_times_with_4_qps_and_8_pairs,
            twenty_times_init_only,
            twenty_times_load_only,
            at_rest_before_dlclose,
            init_again_without_unloading,
            finalize_of_another_context,
            thread_outlives_the_library,
            after_failures,
            with_work_in_flight,
        ],
        once: []
    }
    panic {
        each: [contained],
        once: [contained_before_init, not_in_the_shipped_library]
    }
    many {
        each: [
            sixty_four_pairs,
            threads_with_their_own_pairs,
            connections_come_and_go_beside_traffic,
            two_ends_on_two_threads,
        ],
        once: []
    }
}

/// A build of the plugin that has the entry point which panics: the one that cargo made for these tests when they are
/// built with the feature, as `make test` does; else one in a target folder of its own.
fn panicking_plugin() -> &'static str {
    static BUILT: OnceLock<String> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = if cfg!(feature = "provoke-panic") {
            let program = std::env::current_exe().expect("a program knows where it is");
            program.parent().expect("a program lies in a folder").to_owned()
        } else {
            build_panicking_plugin()
        };
        let path = folder.join("libnccl_net_pinrail.so");
        assert!(path.exists(), "{} is missing", path.display());
        path.to_str().expect("a path of text").to_owned()
    })
}

fn build_panicking_plugin() -> PathBuf {
    let folder = common::root().join("target/provoke-panic");
    // The compiler of this very cargo, also when the test binary is started by hand.
    let done = Command::new(env!("CARGO"))
        .env("RUSTC", Path::new(env!("CARGO")).with_file_name("rustc"))
        .args(["build", "--quiet", "--lib", "--package", "pinrail"])
        .args(["--features", "provoke-panic", "--target-dir"])
        .arg(&folder)
        .current_dir(common::root())
        .output()
        .expect("cargo starts");
    assert!(
        done.status.success(),
        "the build with provoke-panic fails:\n{}",
        String::from_utf8_lossy(&done.stderr)
    );
    folder.join("debug")
}

#[test]
fn every_case_is_a_test() {
    common::build_programs();
    let listed: BTreeSet<String> =
        PROGRAMS.iter().map(|(program, ..)| (*program).to_owned()).collect();
    let made = common::tool("make", "make", &["-s", "-f", "ffi-tests/ffi.mk", "ffi-list"]);
    assert_eq!(
        listed,
        made.split_whitespace().map(str::to_owned).collect(),
        "programs here and programs in ffi-tests"
    );
    for (program, each, once) in PROGRAMS {
        let here: BTreeSet<String> = each
            .iter()
            .flat_map(|case| VERSIONS.iter().map(move |version| format!("{case} v{version}")))
            .chain(once.iter().map(|case| (*case).to_owned()))
            .collect();
        let path = common::programs().join(program);
        let there = common::tool(path.to_str().expect("a path of text"), "gcc", &["--list"]);
        assert_eq!(
            here,
            there.lines().map(str::to_owned).collect(),
            "cases of {program} here and in its --list"
        );
    }
}

#[test]
fn only_the_tables_and_the_c_api_are_exported() {
    let plugin = common::plugin();
    let text = common::tool(
        "nm",
        "binutils",
        &["-D", "--defined-only", plugin.to_str().expect("a path of text")],
    );
    let exported: BTreeSet<&str> =
        text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    for version in VERSIONS {
        let name = format!("ncclNetPlugin_v{version}");
        assert!(exported.contains(name.as_str()), "{name} is not exported");
    }
    let tables: BTreeSet<String> =
        VERSIONS.iter().map(|version| format!("ncclNetPlugin_v{version}")).collect();
    let strange: Vec<&&str> = exported
        .iter()
        .filter(|name| !tables.contains(**name) && !name.starts_with("pinrail_"))
        .collect();
    assert!(strange.is_empty(), "exported besides the tables and pinrail_*: {strange:?}");
    assert!(!exported.contains("pinrail_provoke_panic"), "the test aid is in the shipped library");
}

#[test]
fn nothing_of_verbs_or_cuda_is_linked() {
    let plugin = common::plugin();
    let path = plugin.to_str().expect("a path of text");
    let dynamic = common::tool("readelf", "binutils", &["-dW", path]);
    let value = |line: &str| line.split(['[', ']']).nth(1).unwrap_or_default().to_owned();
    let soname: Vec<String> =
        dynamic.lines().filter(|line| line.contains("(SONAME)")).map(value).collect();
    assert_eq!(soname, ["libnccl-net-pinrail.so"]);
    let libc =
        ["libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libgcc_s.so", "ld-linux"];
    for needed in dynamic.lines().filter(|line| line.contains("(NEEDED)")).map(value) {
        assert!(libc.iter().any(|prefix| needed.starts_with(prefix)), "the library needs {needed}");
    }
    let undefined = common::tool("nm", "binutils", &["-D", "--undefined-only", path]);
    for name in undefined.lines().filter_map(|line| line.split_whitespace().last()) {
        let foreign =
            ["ibv_", "rdma_", "mlx5", "cuda", "nccl"].iter().any(|prefix| name.starts_with(prefix));
        assert!(!foreign, "{name} is left to the dynamic linker");
        // A handler would run in every child of the program, and stay when the library is gone.
        assert!(!name.contains("atfork"), "{name}: a fork handler");
    }
}

/// Cases under valgrind: invalid accesses and leaks of every process fail them. Versions with finalize only: without it
/// nobody tells the library to give back what init made, some 2 KB each time it is loaded.
mod valgrind {
    use super::{Duration, Run, common};

    fn finds_nothing(program: &str, case: &str, version: impl Into<Option<u32>>) {
        common::tool("valgrind", "valgrind", &["--version"]);
        let wrapper = [
            "valgrind",
            "--quiet",
            "--error-exitcode=9",
            "--trace-children=yes",
            "--leak-check=full",
            "--errors-for-leak-kinds=definite",
            "--show-leak-kinds=definite",
            "--keep-debuginfo=yes",
            "--suppressions=ffi-tests/valgrind.supp",
        ];
        let environment = [("FFI_DEADLINE_SCALE", "10")];
        let deadline = Duration::from_secs(1000);
        let version = version.into();
        Run { program, case, version, wrapper: &wrapper, environment: &environment, deadline }
            .expect_success();
    }

    #[test]
    fn one_connection() {
        finds_nothing("transfer", "hello", 12);
    }
    #[test]
    fn a_group() {
        finds_nothing("group", "same_tag_twice", 11);
    }
    #[test]
    fn a_fused_device() {
        finds_nothing("rails", "fused_once", None);
    }
    #[test]
    fn work_in_flight_at_close() {
        finds_nothing("closing", "any_order_with_sends_held", 12);
    }
    #[test]
    fn copies_on_both_ends() {
        finds_nothing("bounce", "hello", 12);
    }
    #[test]
    fn a_handle_gone_in_the_middle_of_a_copy() {
        finds_nothing("bounce_life", "deregistered_in_the_middle_of_a_copy", 12);
    }
    #[test]
    fn a_handle_gone_before_a_long_send_is_copied() {
        finds_nothing("bounce_life", "deregistered_under_a_long_send", 11);
    }
    #[test]
    fn memory_set_aside() {
        finds_nothing("bounce_ahead", "set_aside", 12);
    }
    #[test]
    fn memory_that_outlives_the_library() {
        finds_nothing("hostmem", "outlives_everything", 12);
    }
    #[test]
    fn events_of_work_under_way_at_close() {
        finds_nothing("profiler", "closed_under_way", 12);
    }
    #[test]
    fn a_failing_communicator() {
        finds_nothing("errors", "sent_from_unregistered_memory", 12);
    }
}
