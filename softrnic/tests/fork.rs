//! What registrations do to forked children: the rules of rdma-core, seen in smaps and by children that read. Each case is
//! a process of its own, because marks are armed once.

mod common;

use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::{Guarded, client, compile, fabric, finish};
use softrnic::ledger::pages::page_size;

const OLD_KERNEL: (&str, &str) = ("SOFTRNIC_FORK", "old-kernel");
const OLD_LIBRARY: (&str, &str) = ("SOFTRNIC_FORK", "old-library");
/// A mapping of 16 pages, and marks that are armed.
const ARMED: &str = "map:16 init";

fn program() -> &'static str {
    static PROGRAM: OnceLock<String> = OnceLock::new();
    PROGRAM.get_or_init(|| compile("fork").into_os_string().into_string().expect("UTF-8 path"))
}

/// Runs a command of `tests/c/fork.c`; returns what it printed, joined into one line.
fn answers(mut command: Command, settings: &[(&str, &str)], words: &str) -> String {
    // Whoever runs the tests may have armed marks.
    for name in ["RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE", "RDMAV_USE_MADVISE"] {
        command.env_remove(name);
    }
    command.envs(settings.iter().copied()).args(words.split_whitespace());
    let child = Guarded(command.spawn().expect("starts"));
    let (ok, text) = finish(child, Instant::now() + Duration::from_secs(60));
    assert!(ok, "{words}: {text}");
    text.lines().collect::<Vec<_>>().join(", ")
}

/// On the software RNIC.
fn line(settings: &[(&str, &str)], words: &str) -> String {
    answers(client(program(), &fabric("fork")), settings, words)
}

/// On the software RNIC with armed marks, without what [`ARMED`] prints.
fn armed(words: &str) -> String {
    let text = line(&[OLD_KERNEL], &format!("{ARMED} {words}"));
    text.strip_prefix("map ok, init ok, ").expect(&text).to_owned()
}

#[test]
fn a_new_kernel_with_a_new_library_marks_nothing() {
    let words = "map:4 status init status reg:0:4 marks dont:1:1 marks init calls";
    let wanted = "map ok, status 2, init ok, status 2, reg ok, marks ...., dont ok, marks ...., init ok, calls 0 0";
    assert_eq!(line(&[], words), wanted);
    let all = [("RDMAV_FORK_SAFE", "1"), ("IBV_FORK_SAFE", "1"), ("RDMAV_HUGEPAGES_SAFE", "1")];
    assert_eq!(line(&all, words), wanted, "the environment does not change that");
}

#[test]
fn an_old_kernel_marks_what_is_registered_while_armed() {
    assert_eq!(
        line(&[OLD_KERNEL], "map:4 status init status init reg:0x1004:4 marks status dereg marks"),
        "map ok, status 0, init ok, status 1, init ok, reg ok, marks .d.., status 1, marks ...."
    );
    assert_eq!(
        line(&[OLD_KERNEL], "map:4 reg:0:4 marks status dereg"),
        "map ok, reg ok, marks ...., status 0",
        "not armed"
    );
}

#[test]
fn an_old_library_marks_on_a_new_kernel_too() {
    assert_eq!(
        line(&[OLD_LIBRARY], "map:2 status reg:0:4 marks"),
        "map ok, status 2, reg ok, marks .."
    );
    assert_eq!(
        line(&[OLD_LIBRARY], "map:2 init status reg:0:4 marks"),
        "map ok, init ok, status 2, reg ok, marks d."
    );
    let safe = [OLD_LIBRARY, ("RDMAV_FORK_SAFE", "1")];
    assert_eq!(line(&safe, "map:2 status reg:0:4 marks"), "map ok, status 2, reg ok, marks d.");
}

#[test]
fn whatever_comes_first_makes_it_too_late() {
    for early in ["reg:0:4", "dont:0:1", "do:0:1", "nothing", "fail:1 reg:0:4"] {
        let text = line(&[OLD_KERNEL], &format!("map:1 {early} init status reg:0:4 marks"));
        assert!(text.ends_with("init EINVAL, status 0, reg ok, marks ."), "{early}: {text}");
    }
    assert_eq!(line(&[OLD_KERNEL], "map:1 dmabuf init status"), {
        "map ok, reg ok, init ok, status 1"
    });
}

#[test]
fn the_environment_arms_when_devices_are_first_asked_for() {
    let words = "map:1 status devices status reg:0:4 marks";
    let wanted = "map ok, status 0, status 1, reg ok, marks d";
    for (name, value) in
        [("RDMAV_FORK_SAFE", "1"), ("IBV_FORK_SAFE", "1"), ("RDMAV_FORK_SAFE", "0")]
    {
        assert_eq!(line(&[OLD_KERNEL, (name, value)], words), wanted, "{name}={value}");
    }
    let late = line(&[OLD_KERNEL, ("IBV_FORK_SAFE", "")], "map:1 dont:0:1 devices devices status");
    assert_eq!(late.matches("WARN IBV_FORK_SAFE is set, but ibv_fork_init failed").count(), 1);
    assert!(late.contains("status 0"), "{late}");
}

#[test]
fn every_page_is_counted_by_itself() {
    // Regions 0: pages 2-5, 1: nested in it, 2: once more, 3: overlaps its end, 4: joins on.
    let regs = "reg:0x2000:0x4000 reg:0x3ffc:8 reg:0x2000:0x4000 reg:0x5800:0x1800 reg:0x7000:1 marks calls";
    let text = armed(&format!(
        "{regs} dereg:0 marks dereg:2 marks calls dereg:3 marks dereg:1 marks dereg:4 marks calls withheld"
    ));
    assert_eq!(
        text,
        "reg ok, reg ok, reg ok, reg ok, reg ok, marks ..dddddd........, calls 3 0, \
         marks ..dddddd........, marks ...ddddd........, calls 3 1, marks ...dd..d........, \
         marks .......d........, marks ................, calls 3 4, withheld 0"
    );
    // Any order ends the same way.
    for order in ["0 1 2", "2 1 0", "1 0 2", "1 2 0"] {
        let downs: String = order.split(' ').map(|n| format!(" dereg:{n}")).collect();
        let text =
            armed(&format!("reg:0:0x3000 reg:0x1000:0x3000 reg:0x2000:1 marks {downs} marks"));
        assert_eq!(
            text, "reg ok, reg ok, reg ok, marks dddd............, marks ................",
            "{order}"
        );
    }
}

#[test]
fn a_failed_registration_leaves_no_mark() {
    assert_eq!(
        armed("fail:1 reg:0:4 marks calls reg:0:4 marks fail:1 reg:0:0x2000 marks"),
        "reg ENOMEM, marks ................, calls 1 1, reg ok, marks d..............., \
         reg ENOMEM, marks d..............."
    );
    assert_eq!(armed("reg:0:0 marks calls"), "reg EINVAL, marks ................, calls 0 0");
}

/// What happens at a hole is not what one would want, but it is what rdma-core does: see the comparison below.
#[test]
fn a_hole_is_refused_before_the_device_sees_it() {
    assert_eq!(armed("hole:5 reg:0x4000:0x3000 marks"), "reg ENOMEM, marks ....d-d.........");
    assert_eq!(line(&[], "map:4 hole:1 reg:0:0x3000"), "map ok, reg EFAULT");
}

#[test]
fn a_region_that_goes_with_its_context_leaves_its_marks() {
    assert_eq!(armed("reg:0:4 close marks"), "reg ok, marks d...............");
}

#[test]
fn a_dmabuf_is_not_marked() {
    assert_eq!(
        armed("dmabuf withheld reg:0:4 dereg:0 marks calls"),
        "reg ok, withheld 0, reg ok, marks d..............., calls 1 0"
    );
}

#[test]
fn four_bytes_of_the_heap_cost_a_child_its_page() {
    let page = page_size();
    for setting in [OLD_KERNEL, OLD_LIBRARY] {
        assert_eq!(
            line(&[setting], "init heap"),
            format!("init ok, withheld {page}, registered SIGSEGV, withheld 0, deregistered 0")
        );
    }
    let harmless = "withheld 0, registered 0, withheld 0, deregistered 0";
    assert_eq!(line(&[], "init heap"), format!("init ok, {harmless}"));
    assert_eq!(line(&[OLD_KERNEL], "heap"), harmless, "nobody armed it");
    assert_eq!(line(&[("RDMAV_FORK_SAFE", "1")], "heap"), harmless);
}

#[test]
fn a_child_is_left_alone() {
    assert_eq!(
        armed("reg:0x1000:4 reads:0 reads:1 child marks calls"),
        "reg ok, reads 0, reads SIGSEGV, marks .-.............., calls 1 0"
    );
    // It may use the device afresh; nothing is marked or given back for it.
    assert_eq!(
        armed("reg:0x1000:4 child reg:0:4 dont:2:1 do:0:16 marks init status calls"),
        "reg ok, reg ok, dont ok, do ok, marks .-.............., init ok, status 1, calls 1 0"
    );
}

#[test]
fn threads_leave_nothing_behind() {
    assert_eq!(armed("threads:4 marks reg:0:4 marks"), {
        "marks ................, reg ok, marks d..............."
    });
}

#[test]
fn huge_pages_are_marked_whole_if_that_is_set() {
    let safe = [OLD_KERNEL, ("RDMAV_HUGEPAGES_SAFE", "1")];
    assert_eq!(
        line(&safe, "map:4 init reg:0x1004:4 marks dereg marks"),
        "map ok, init ok, reg ok, marks .d.., marks ....",
        "ordinary memory has ordinary pages"
    );
    let words = "huge:4 init reg:0x201000:4 withheld reads:0 reads:512 dereg:0 withheld";
    let text = line(&safe, "huge:4");
    if text != "map ok" {
        eprintln!(
            "not run: no two free huge pages of 2 MiB here ({text}); units test the rounding"
        );
        return;
    }
    assert_eq!(line(&safe, words), {
        "map ok, init ok, reg ok, withheld 2097152, reads 0, reads SIGSEGV, withheld 0"
    });
    assert_eq!(
        line(&[OLD_KERNEL], "huge:4 init reg:0x201000:4 withheld"),
        "map ok, init ok, reg EINVAL, withheld 0",
        "base pages cannot be split off"
    );
}

/// The system's own library on the same words. It needs no device for them.
fn system(words: &str) -> String {
    let mut command = Command::new(program());
    command.env_remove("LD_LIBRARY_PATH");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    answers(command, &[], words)
}

/// The setting that presents what the system's library and kernel are.
fn pair_of_the_system() -> (&'static str, &'static str) {
    match system("map:1 status init status dont:0:1 marks").as_str() {
        "map ok, status 0, init ok, status 1, dont ok, marks d" => OLD_KERNEL,
        "map ok, status 2, init ok, status 2, dont ok, marks d" => OLD_LIBRARY,
        "map ok, status 2, init ok, status 2, dont ok, marks ." => {
            ("SOFTRNIC_FORK", "copy-on-fork")
        }
        other => panic!("no pair of library and kernel behaves like this: {other}"),
    }
}

/// A walk over 16 pages: ranges come and go in any order, some are given back that nobody withheld, and mappings vanish.
fn walk(seed: u64) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |limit: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % limit
    };
    let mut words = ARMED.to_owned();
    let mut held: Vec<(u64, u64)> = Vec::new();
    // A third of the walks stays free of holes, and another of stray ends.
    let (holes, strays) = (!seed.is_multiple_of(3), seed % 3 != 1);
    for _ in 0..40 {
        let first = next(16);
        let count = 1 + next(16 - first);
        match next(20) {
            0 if holes => words += &format!(" hole:{first}"),
            1 if strays => words += &format!(" do:{first}:{count}"),
            2 => words += &format!(" dontb:{}:{}", first * 4096 + next(4096), next(9000)),
            3..=9 if !held.is_empty() => {
                let at = usize::try_from(next(held.len() as u64)).expect("small");
                let (first, count) = held.swap_remove(at);
                words += &format!(" do:{first}:{count}");
            }
            _ => {
                held.push((first, count));
                words += &format!(" dont:{first}:{count}");
            }
        }
        words += " marks";
    }
    words
}

#[test]
fn marks_are_those_of_the_systems_library() {
    let pair = pair_of_the_system();
    println!("the system's library and kernel are {}", pair.1);
    for early in ["dont:0:1", "do:0:1", "nothing", "devices"] {
        let words = format!("map:2 {early} init status dont:0:1 marks");
        assert_eq!(line(&[pair], &words), system(&words), "{words}");
    }
    let mut refused = 0;
    for seed in 0..60 {
        let words = walk(seed);
        let answer = line(&[pair], &words);
        assert_eq!(answer, system(&words), "{words}");
        refused += answer.matches("dont ENOMEM").count();
    }
    assert!(refused > 20 || pair.1 == "copy-on-fork", "{refused} refusals are too few to compare");
}
