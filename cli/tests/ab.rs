//! `pinrail ab` on a program that stands in for one of nccl-tests: it prints what those print, and differs by
//! `NCCL_NET_PLUGIN` as the test wants.

use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

const PINRAIL: &str = env!("CARGO_BIN_EXE_pinrail");

/// What both sides print of NCCL's log, before the table.
const LOG: &str = r##"
case $NCCL_NET_PLUGIN in none) net=IB;; *) net=pinrail;; esac
echo "$NCCL_NET_PLUGIN $NCCL_NET $NCCL_DEBUG $EXTRA" >> "$TRACE"
rounds=$(wc -l < "$TRACE")
log() { echo "node6:10:11 [0] NCCL INFO $*"; }
echo "NCCL version 2.21.5+cuda12.4"
log "Using network $net"
log "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/$net/0/GDRDMA"
"##;

/// A table of two sizes; pinrail is twice as fast at 8 bytes and half as fast at 1M.
const TABLE: &str = r##"
echo "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
row() { printf '%12d  %12d  %8s  %6s  %6s  %7s  %6s  %6s  %5s  %7s  %6s  %6s  %5s\n' $1 $2 float sum -1 $3 1.00 $4 $5 $3 1.00 $4 $5; }
if [ $net = IB ]; then row 8 2 20.00 0.00 0; row 1048576 262144 100.0 10.00 0
else row 8 2 10.00 0.00 ${WRONG:-0}; row 1048576 262144 200.0 5.00 0; fi
echo "# Out of bounds values : 0 OK"
"##;

/// A folder with the program, that goes away with the value.
struct Bed(PathBuf);

impl Bed {
    fn new(body: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("pinrail-ab-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let program = folder.join("all_reduce_perf");
        std::fs::write(&program, format!("#!/bin/sh\n{body}")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn run(&self, options: &[&str]) -> Output {
        self.run_with(options, &[])
    }

    fn run_with(&self, options: &[&str], environment: &[(&str, &str)]) -> Output {
        Command::new(PINRAIL)
            .arg("ab")
            .args(options)
            .arg("--")
            .arg(self.path("all_reduce_perf"))
            .args(["-b", "8"])
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("TRACE", self.path("trace"))
            .envs(environment.iter().copied())
            .current_dir(&self.0)
            .output()
            .expect("the command runs")
    }

    fn json(&self, options: &[&str]) -> (i32, Value) {
        let output = self.run(&[options, &["--json"]].concat());
        let text = String::from_utf8(output.stdout).unwrap();
        let value: Value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr)));
        let code = output.status.code().expect("an exit status");
        assert_eq!(value["exit_code"], code, "{value:#}");
        (code, value)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Levels, sides and texts of what was found.
fn findings(value: &Value) -> Vec<(String, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = value["findings"].as_array().unwrap();
    all.iter().map(|f| (text(&f["level"]), text(&f["side"]), text(&f["what"]))).collect()
}

#[test]
fn ratios_and_a_page_come_of_interleaved_rounds() {
    let bed = Bed::new(&format!("{LOG}{TABLE}"));
    let (code, value) = bed.json(&["-n", "3", "--b-env", "EXTRA=x y"]);
    assert_eq!((code, findings(&value)), (0, vec![]));
    // The order alternates, and each side has its variables.
    assert_eq!(
        bed.read("trace"),
        "none IB INFO \npinrail pinrail INFO x y\npinrail pinrail INFO x y\nnone IB INFO \nnone IB INFO \npinrail pinrail INFO x y\n"
    );
    let points = value["points"].as_array().unwrap();
    let shown: Vec<_> = points
        .iter()
        .map(|p| {
            (
                p["size"].as_u64().unwrap(),
                p["series"].as_str().unwrap(),
                p["ratio"]["median"].as_f64().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            (8, "out-of-place", 2.0),
            (1 << 20, "out-of-place", 0.5),
            (8, "in-place", 2.0),
            (1 << 20, "in-place", 0.5)
        ]
    );
    assert!(points.iter().all(|p| p["one_sided"] == true && p["ratio"]["rounds"] == 3));
    assert_eq!(
        (value["a"]["network"].as_str(), value["b"]["network"].as_str()),
        (Some("IB"), Some("pinrail"))
    );
    assert_eq!(value["a"]["nccl"], "2.21.5+cuda12.4");
    let names: Vec<_> = value["differences"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["EXTRA", "NCCL_NET", "NCCL_NET_PLUGIN"]);

    let page = bed.read("pinrail-ab.html");
    assert_eq!(value["page"], "pinrail-ab.html");
    assert_eq!(page.matches("<figure>").count(), 3);
    // Nothing is fetched from anywhere, and nothing runs.
    for outside in ["http:", "https:", "<script", "<img", "<link", "@import", "url(", "src="] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("B to A, in-place, 1048576 bytes: 0.500"));
}

#[test]
fn people_get_the_same_as_text() {
    let bed = Bed::new(&format!("{LOG}{TABLE}"));
    let output = bed.run(&["-n", "1", "--no-html"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(!bed.path("pinrail-ab.html").exists());
    for part in [
        "A: none (NCCL's own transport); network IB\n",
        "B: pinrail; network pinrail\n",
        "1M  float sum  out-of-place  100.0  200.0   10.00    5.00   0.500   0.500    0.500       0\n",
        "float sum: B to A 1.250 over all sizes; lowest 0.500 at 1M, highest 2.000 at 8\n",
        "NCCL_NET_PLUGIN: A none, B pinrail\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_makes_a_comparison_worthless_is_a_problem() {
    // name, body, what is found: level, side, part of the text; exit status.
    let silent = LOG.replace("log() { echo \"node6:10:11 [0] NCCL INFO $*\"; }", "log() { :; }");
    let falls_back = LOG.replace("*) net=pinrail", "*) net=Socket");
    let half = format!(
        "{LOG}{TABLE}\n[ $net = pinrail ] && echo 'node7:9:9 [0] NCCL INFO Using network Socket'; exit 0"
    );
    let within = LOG.replace("via NET/$net/0/GDRDMA", "via P2P/CUMEM");
    for (name, body, level, side, part, code) in [
        (
            "another network",
            format!("{falls_back}{TABLE}"),
            "problem",
            "B",
            "network Socket was used, not pinrail",
            1,
        ),
        (
            "some ranks on another",
            half,
            "problem",
            "B",
            "ranks used different networks: Socket, pinrail",
            1,
        ),
        (
            "wrong data",
            format!("{LOG}WRONG=5\n{TABLE}"),
            "problem",
            "B",
            "10 results were wrong",
            1,
        ),
        (
            "values out of bounds",
            format!("{LOG}{}", TABLE.replace("values : 0 OK", "values : 3 FAILED")),
            "problem",
            "A",
            "counts 3 values out of bounds",
            1,
        ),
        ("no log", format!("{silent}{TABLE}"), "unknown", "A", "no line of NCCL's log", 2),
        ("no table", LOG.to_owned(), "unknown", "A", "there is no table", 2),
        ("one host", format!("{within}{TABLE}"), "unknown", "A", "NCCL_P2P_DISABLE=1", 2),
        (
            "other parameters",
            format!("echo \"# nThread 1 iters: 2$NCCL_NET\"\n{LOG}{TABLE}"),
            "advice",
            "",
            "runs measured differently: nThread 1 iters: 2IB | nThread 1 iters: 2pinrail",
            0,
        ),
        (
            "a row that ends early",
            format!(
                "{LOG}{TABLE}\necho '           4             1     float     sum      -1'\nrow 4 1 1.00 1.00 0"
            ),
            "advice",
            "A",
            "1 rows of the table could not be read",
            0,
        ),
    ] {
        let bed = Bed::new(&body);
        let (status, value) = bed.json(&["-n", "2"]);
        assert_eq!(status, code, "{name}: {value:#}");
        let found = findings(&value);
        assert!(
            found.iter().any(|(l, s, t)| l == level && s == side && t.contains(part)),
            "{name}: {found:?}"
        );
        // What was found is on the page too.
        let page = bed.read("pinrail-ab.html");
        assert!(page.contains(&format!("class=\"{level}\"")), "{name}");
    }
}

#[test]
fn a_run_that_fails_is_told_with_its_last_lines() {
    let dies = "[ $net = pinrail ] && { echo 'last <words>' >&2; exit 7; }\n";
    let bed = Bed::new(&format!("{LOG}{dies}{TABLE}"));
    let (code, value) = bed.json(&["-n", "3"]);
    assert_eq!(code, 1);
    assert!(findings(&value).iter().any(|(_, s, t)| s == "B" && t.contains("ended with status 7")));
    let runs = value["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2, "the first failure ends it");
    let tail = runs[1]["last_lines"].as_array().unwrap();
    assert!(tail.contains(&Value::from("last <words>")), "{tail:?}");
    assert!(bed.read("pinrail-ab.html").contains("last &lt;words&gt;"));

    let (_, value) = bed.json(&["-n", "3", "--keep-going"]);
    assert_eq!(value["runs"].as_array().unwrap().len(), 6);

    // Once in three rounds: the others count.
    let once = "[ $net = pinrail ] && [ $rounds = 2 ] && exit 7\n";
    let bed = Bed::new(&format!("{LOG}{once}{TABLE}"));
    let (code, value) = bed.json(&["-n", "3", "--keep-going"]);
    assert_eq!((code, value["points"][0]["ratio"]["rounds"].as_u64()), (1, Some(2)));

    let text = String::from_utf8(bed.run(&["-n", "1", "--no-html"]).stdout).unwrap();
    assert!(!text.contains("last lines"), "{text}");
}

#[test]
fn a_run_that_hangs_is_ended_at_the_deadline() {
    let bed =
        Bed::new(&format!("{LOG}{TABLE}echo 'and then nothing'\nwhile :; do sleep 1000; done"));
    let output = bed.run(&["-n", "1", "--deadline", "2", "--no-html"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("the command did not end within 2 s (--deadline), and was killed"),
        "{text}"
    );
    assert!(text.contains("last lines of A in round 1:\n"), "{text}");
}

#[test]
fn what_cannot_be_done_is_said_before_anything_runs() {
    let bed = Bed::new(&format!("{LOG}{TABLE}"));
    let folder = bed.0.to_str().unwrap().to_owned();
    for (options, part) in [
        (vec!["--a", "/no/such.so"], "--a: /no/such.so: No such file"),
        (vec!["--b", "none"], "there is nothing to compare"),
        (vec!["--html", "/no/such/folder/x.html"], "cannot be written"),
        (vec!["--html", &folder], "it is a folder"),
        (vec!["--html", "/dev/null"], "it is no plain file"),
    ] {
        let output = bed.run(&[options.clone(), vec!["--json"]].concat());
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with("pinrail ab: ") && error.contains(part), "{options:?}: {error}");
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(value["error"].as_str().unwrap().contains(part));
    }
    assert!(!bed.path("trace").exists(), "nothing ran");
    let left: Vec<_> = std::fs::read_dir(&bed.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["all_reduce_perf"], "nothing is left");
}

#[test]
fn a_program_that_is_not_there_and_the_users_own_variables() {
    let bed = Bed::new("");
    let output = Command::new(PINRAIL)
        .args(["ab", "--no-html", "--json", "--", "/no/such/program"])
        .output()
        .unwrap();
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(findings(&value).iter().any(|(_, _, t)| t.contains("/no/such/program")), "{value:#}");
    assert_eq!((output.status.code(), value["runs"].as_array().unwrap().len()), (Some(1), 1));

    // NCCL_DEBUG stays as the user set it, a variable of a side wins over what the plugin needs.
    let bed2 = Bed::new(&format!("{LOG}{TABLE}"));
    let options = ["-n", "1", "--no-html", "--a-env", "NCCL_NET=Other"];
    let output = bed2.run_with(&options, &[("NCCL_DEBUG", "TRACE")]);
    assert_eq!(bed2.read("trace"), "none Other TRACE \npinrail pinrail TRACE \n");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("network IB was used, not Other"), "{text}");
    drop(bed);
}

#[test]
fn a_record_has_more_digits_than_the_table() {
    let record = r##"
file=$RECORD.$rounds
cat > "$file" <<END
{ "version": 3, "results": [
  { "size": 8, "count": 2, "type": "float", "redop": "sum", "root": "    -1",
    "out_of_place": { "time": 20.123456, "alg_bw": 0.0004, "bus_bw": 0.0007, "nwrong": 0.0 },
    "in_place": { "time": 10.0, "alg_bw": 0.0004, "bus_bw": 0.0007, "nwrong": 0.0 } },
  { "size": 1048576, "count": 262144, "type": "float", "redop": "sum", "root": "    -1",
    "out_of_place": { "time": 100.0, "alg_bw": 10.0, "bus_bw": 10.0, "nwrong": 0.0 },
    "in_place": { "time": 100.0, "alg_bw": 10.0, "bus_bw": 10.0, "nwrong": 0.0 } } ],
  "out_of_bounds": { "count": 0, "okay": "true" } }
END
echo "# Writing JSON output to $file"
"##;
    let bed = Bed::new(&format!("RECORD=record\n{LOG}{record}{TABLE}"));
    let (code, value) = bed.json(&["-n", "1"]);
    assert_eq!((code, findings(&value)), (0, vec![]));
    assert_eq!(value["points"][0]["time_us"]["a"]["median"], 20.123456);
    // One that cannot be read is told, and the table used.
    let bed = Bed::new(&format!("{LOG}echo '# Writing JSON output to /no/such.json'\n{TABLE}"));
    let (code, value) = bed.json(&["-n", "1"]);
    assert_eq!(code, 0);
    assert!(findings(&value).iter().any(|(l, _, t)| l == "advice" && t.contains("/no/such.json")));
    assert_eq!(value["points"][0]["time_us"]["a"]["median"], 20.0);
}

#[test]
fn an_interruption_ends_the_run_and_shows_the_rounds_before_it() {
    let stops = "if [ $rounds = 3 ]; then kill -INT $PPID; while :; do sleep 1000; done; fi\n";
    let bed = Bed::new(&format!("{LOG}{stops}{TABLE}"));
    let (code, value) = bed.json(&["-n", "5"]);
    assert_eq!(code, 2, "{value:#}");
    assert_eq!(value["rounds"]["whole"], 1);
    assert_eq!(value["points"][0]["ratio"]["median"], 2.0);
    assert!(Path::new(&bed.path("pinrail-ab.html")).exists());
}
