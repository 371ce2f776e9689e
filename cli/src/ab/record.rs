//! Results that programs wrote as JSON: nccl-tests with `-J`, and the bench.

use super::row::{Row, Series, median};
use nccl_net_pinrail::host::plain;
use serde_json::Value;
use std::path::Path;

/// No record is longer. With times of single iterations they are long.
const LONGEST: u64 = 64 << 20;

/// What a record of nccl-tests holds.
#[derive(Debug, Default, PartialEq)]
pub struct Record {
    /// The rows, with all digits.
    pub rows: Vec<Row>,
    /// How often the program counts results as wrong.
    pub out_of_bounds: Option<u64>,
}

/// Reads a file.
///
/// # Errors
/// In words: it is not there, not plain, too long, or not JSON.
fn document(path: &Path) -> Result<Value, String> {
    let bytes = plain::read(path, LONGEST).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_slice(&bytes).map_err(|e| format!("{} is no JSON: {e}", path.display()))
}

/// Reads what nccl-tests wrote.
///
/// # Errors
/// In words.
pub fn of_nccl_tests(path: &Path) -> Result<Record, String> {
    let value = document(path)?;
    if !value["results"].is_array() {
        return Err(format!("{} has no list `results`", path.display()));
    }
    Ok(nccl_tests(&value))
}

fn nccl_tests(value: &Value) -> Record {
    let mut record =
        Record { out_of_bounds: value["out_of_bounds"]["count"].as_u64(), ..Record::default() };
    for result in value["results"].as_array().into_iter().flatten() {
        let Some(size) = result["size"].as_u64() else { continue };
        let words = ["type", "redop", "root"].map(|key| result[key].as_str().unwrap_or("").trim());
        let telling = |word: &&str| !matches!(*word, "" | "none" | "-1");
        let label: Vec<&str> = words.into_iter().filter(telling).collect();
        for (key, series) in [("out_of_place", Series::OutOfPlace), ("in_place", Series::InPlace)] {
            let part = &result[key];
            let mut row = Row::new(size, label.join(" "), series);
            row.time_us = part["time"].as_f64().or_else(|| part["cpu_time"].as_f64());
            row.bandwidth_gbs = part["bus_bw"].as_f64();
            row.algorithm_gbs = part["alg_bw"].as_f64();
            row.wrong = part["nwrong"].as_f64();
            if row.time_us.is_some() {
                record.rows.push(row);
            }
        }
    }
    record
}

/// What a record of the bench holds.
#[derive(Debug, PartialEq)]
pub struct Bench {
    /// The rows.
    pub rows: Vec<Row>,
    /// The name that the plugin has for itself, and its table version.
    pub plugin: String,
}

/// Reads what the bench wrote.
///
/// # Errors
/// In words.
pub fn of_bench(path: &Path) -> Result<Bench, String> {
    let value = document(path)?;
    bench(&value).ok_or_else(|| format!("{} is no record of pinrail-bench", path.display()))
}

fn bench(value: &Value) -> Option<Bench> {
    let plugin = value["plugins"].as_array()?.first()?;
    let name = format!("{} (ncclNet v{})", plugin["name"].as_str()?, plugin["abi"].as_u64()?);
    let mut rows = Vec::new();
    for row in value["rows"].as_array()? {
        for (kind, label) in [("plugins", ""), ("bounced", "bounced")] {
            let Some(figures) = row[kind].as_array().and_then(|all| all.first()) else { continue };
            let size = figures["size"].as_u64()?;
            let mut latency = Row::new(size, label.to_owned(), Series::Latency);
            latency.time_us = figures["latency_us"].as_f64();
            let mut stream = Row::new(size, label.to_owned(), Series::Stream);
            let rounds: Vec<f64> =
                figures["bandwidth_gbs"].as_array()?.iter().filter_map(Value::as_f64).collect();
            stream.bandwidth_gbs = median(&rounds);
            stream.wrong = figures["wrong"].as_f64();
            rows.extend([stream, latency]);
        }
    }
    Some(Bench { rows, plugin: name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_record_of_nccl_tests_is_read_with_all_digits() {
        let value = json!({
            "version": 3, "args": ["all_reduce_perf"], "nccl_version": 22809,
            "results": [
                { "size": 8, "count": 2, "type": "float", "redop": "sum", "root": "    -1",
                  "out_of_place": { "time": 14.253_112, "alg_bw": 0.000_561, "bus_bw": 0.000_982, "nwrong": 0.0 },
                  "in_place": { "time": 14.1, "alg_bw": 0.000_567, "bus_bw": "nan", "nwrong": null },
                  "actual_iterations": 20, "experiment_name": "AllReduce" },
                { "size": 16, "count": 4, "type": "float", "redop": "none", "root": "     0",
                  "out_of_place": null,
                  "in_place": { "cpu_time": 3.0, "alg_bw": 1.0, "bus_bw": 2.0, "nwrong": 1.0 } },
                { "count": 4 }
            ],
            "out_of_bounds": { "count": 1, "okay": "false" },
        });
        let record = nccl_tests(&value);
        assert_eq!(record.out_of_bounds, Some(1));
        let shown: Vec<_> = record
            .rows
            .iter()
            .map(|r| (r.size, r.label.as_str(), r.series, r.time_us, r.bandwidth_gbs, r.wrong))
            .collect();
        assert_eq!(
            shown,
            [
                (8, "float sum", Series::OutOfPlace, Some(14.253_112), Some(0.000_982), Some(0.0)),
                (8, "float sum", Series::InPlace, Some(14.1), None, None),
                (16, "float 0", Series::InPlace, Some(3.0), Some(2.0), Some(1.0)),
            ]
        );
    }

    #[test]
    fn a_record_of_the_bench_is_read() {
        let value = json!({
            "plugins": [{ "name": "pinrail", "abi": 12 }],
            "rows": [{
                "plugins": [{ "size": 8, "latency_us": 5.0, "bandwidth_gbs": [1.0, 3.0, 2.0], "wrong": 0 }],
                "bounced": [{ "size": 8, "latency_us": 6.0, "bandwidth_gbs": [0.5], "wrong": null }],
            }],
        });
        let bench = bench(&value).unwrap();
        assert_eq!(bench.plugin, "pinrail (ncclNet v12)");
        let shown: Vec<_> = bench
            .rows
            .iter()
            .map(|r| (r.label.as_str(), r.series, r.time_us, r.bandwidth_gbs, r.wrong))
            .collect();
        assert_eq!(
            shown,
            [
                ("", Series::Stream, None, Some(2.0), Some(0.0)),
                ("", Series::Latency, Some(5.0), None, None),
                ("bounced", Series::Stream, None, Some(0.5), None),
                ("bounced", Series::Latency, Some(6.0), None, None),
            ]
        );
        for damaged in [json!({}), json!({ "plugins": [], "rows": [] }), json!([1])] {
            assert_eq!(super::bench(&damaged), None, "{damaged}");
        }
    }
}
