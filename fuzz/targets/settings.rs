//! Whatever is in the environment: settings with a value for each row, notices of one line each, no panic.
//!
//! The input is lines of `NAME=value`; a first byte below the number of rows stands for the name of that row.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nccl_net_pinrail::config::{INERT, Origin, Settings, TABLE, Variable};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

fn seeds() -> Vec<Vec<u8>> {
    let values = [
        "0",
        "1",
        "-2",
        "31",
        "18446744073709551616",
        "0x1f",
        "^=mlx5_0:1,mlx5_1",
        "=^eth0,lo",
        "fe80::/10",
        "10.0.0.0/8",
        "AF_INET6",
        "INFO",
        "TRACE",
        "/tmp/libibverbs.so.1",
        "pinrail",
        " 2 ",
    ];
    let mut seeds: Vec<Vec<u8>> = TABLE
        .iter()
        .map(|row| {
            let lines: Vec<_> = values.iter().map(|v| format!("{}={v}", row.name)).collect();
            lines.join("\n").into_bytes()
        })
        .collect();
    seeds.push(INERT.iter().flat_map(|row| format!("{}=1\n", row.name).into_bytes()).collect());
    seeds.push(b"NCCL_IB_TIMEOUTT=1\nPINRAIL_X=y\nNCCL_IB_=\n=1".to_vec());
    // Every value for every row at once, one line each, with the short form of the name.
    for value in values {
        let line = |row: u8| [&[row], b"=".as_slice(), value.as_bytes(), b"\n"].concat();
        seeds.push((0..TABLE.len().min(10) as u8).flat_map(line).collect());
    }
    seeds
}

fn variable(line: &[u8]) -> Option<Variable> {
    let equals = line.iter().position(|byte| *byte == b'=')?;
    let name = match line[..equals] {
        [row] if usize::from(row) < TABLE.len() => TABLE[usize::from(row)].name.to_owned(),
        ref name => String::from_utf8(name.to_vec()).ok()?,
    };
    let value = OsString::from_vec(line[equals + 1..].to_vec());
    Some(Variable { name, value, origin: Origin::Environment })
}

fuzz_target!(
    init: pinrail_fuzz::plant("settings", seeds()),
    |data: &[u8]| {
        let variables = || data.split(|byte| *byte == b'\n').filter_map(variable).take(64);
        let (settings, notices) = Settings::from_variables(variables());
        let one_line = |text: String| assert!(!text.contains(char::is_control), "{text:?}");
        one_line(settings.summary());
        for notice in notices {
            one_line(notice.to_string());
        }
        // Each variable alone is read too: in company the first of equal names counts.
        for one in variables().take(8) {
            let (settings, _) = Settings::from_variables([one]);
            one_line(settings.summary());
        }
    }
);
