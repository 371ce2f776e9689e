use super::*;
use proptest::prelude::*;

fn read(text: &str) -> Table {
    let mut table = Table::default();
    text.lines().for_each(|line| table.line(line));
    table
}

/// Sizes with the series and whether each has a time, both bandwidths and a count of wrong results.
fn shape(table: &Table) -> Vec<(u64, Series, [bool; 4])> {
    let has = |row: &Row| {
        [row.time_us, row.bandwidth_gbs, row.algorithm_gbs, row.wrong].map(|one| one.is_some())
    };
    table.rows.iter().map(|row| (row.size, row.series, has(row))).collect()
}

fn whole(sizes: &[u64], has: [bool; 4]) -> Vec<(u64, Series, [bool; 4])> {
    let both = |size: &u64| [Series::OutOfPlace, Series::InPlace].map(|one| (*size, one, has));
    sizes.iter().flat_map(both).collect()
}

const SIZES: [u64; 4] = [8, 1024, 1 << 20, 1 << 30];
/// Times and bandwidths; the deviation of old releases is no count.
const UNCOUNTED: [bool; 4] = [true, true, true, false];

#[test]
fn releases_before_2_13_print_a_deviation() {
    let table = read(include_str!("../samples/2.9.txt"));
    assert_eq!(shape(&table), whole(&SIZES, UNCOUNTED));
    assert!(table.rows.iter().all(|row| row.label == "float sum"), "{:?}", table.rows);
    assert_eq!((table.odd, table.out_of_bounds), (0, Some(0)));
    let parameters = table.parameters.as_deref().unwrap();
    assert!(parameters.ends_with("warmup iters: 5 iters: 20 validation: 1"), "{parameters}");
    assert_eq!(table.release, None);
    let last = table.rows.last().unwrap();
    assert!(last.time_us.unwrap() > 90_000.0 && last.bandwidth_gbs.unwrap() > 15.0, "{last:?}");

    let table = read(include_str!("../samples/2.9-all_gather.txt"));
    assert_eq!(shape(&table), whole(&SIZES[1..], UNCOUNTED));
    assert!(table.rows.iter().all(|row| row.label == "float"), "{:?}", table.rows);
}

#[test]
fn releases_from_2_13_on_count_wrong_results() {
    let table = read(include_str!("../samples/2.13.txt"));
    assert_eq!(shape(&table), whole(&SIZES, [true; 4]));
    let wrong: Vec<_> = table.rows.iter().filter_map(|row| row.wrong).collect();
    assert_eq!(wrong, [0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0]);
    assert_eq!(table.out_of_bounds, Some(2));
}

#[test]
fn timestamps_and_figures_of_single_iterations_are_passed_over() {
    let table = read(include_str!("../samples/2.19.txt"));
    assert_eq!(shape(&table), whole(&SIZES, [true; 4]));
    assert_eq!(table.json.as_deref(), Some("/tmp/nowhere/result.json"));
    assert_eq!(table.release.as_deref(), Some("2.19.6"));
    let parameters = table.parameters.as_deref().unwrap();
    assert!(parameters.contains("warmup iters: 1 iters: 20 agg iters: 1"), "{parameters}");
    assert_eq!((table.odd, table.out_of_bounds), (0, Some(0)));

    let table = read(include_str!("../samples/2.19-each.txt"));
    assert_eq!(shape(&table), whole(&SIZES, UNCOUNTED));
    assert!(table.rows.iter().all(|row| row.label == "bfloat16 1"), "{:?}", table.rows);
    let (first, last) = (&table.rows[0], &table.rows[7]);
    assert!((first.time_us.unwrap() - 14.0).abs() < 0.5, "{first:?}");
    assert!(last.time_us.unwrap() > 90_000.0, "the second group begins where it should: {last:?}");
}

#[test]
fn a_row_that_the_log_breaks_is_put_together() {
    let table = read(include_str!("../samples/2.16-with-log.txt"));
    let has = [true; 4];
    let mut expected = whole(&[8, 16], has);
    expected.push((32, Series::InPlace, has));
    assert_eq!(shape(&table), expected);
    assert_eq!(table.odd, 0);
    assert!(table.rows.iter().all(|row| row.label == "float sum"), "{:?}", table.rows);
}

#[test]
fn what_is_no_row_is_none() {
    let table = read(
        "          8             2     float     sum      -1    1.0   2.0   3.0      0    1.0   2.0   3.0      0\n\
         #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n\
         some other program: 8 of 9 done\n\
           12 monkeys\n\
                  16             4     float     sum      -1  node died\n\
                  32             8     float     sum      -1     1.0   2.0   3.0      0     1.0   2.0   3.0      0\n\
                  64            16     float     sum      -1     inf   nan   nan      0     1.0   0.0   0.0      1\n",
    );
    let sizes: Vec<_> = table.rows.iter().map(|row| (row.size, row.series)).collect();
    assert_eq!(
        sizes,
        [(32, Series::OutOfPlace), (32, Series::InPlace), (64, Series::InPlace)],
        "rows before the heading, broken ones and times that are none do not count"
    );
    assert_eq!(table.odd, 2);
}

#[test]
fn marks_of_launchers_go() {
    for (marked, plain) in [
        ("[1,0]<stdout>:  8  2", "  8  2"),
        ("[prterun-n1-7@1,3]<stderr>:x", "x"),
        ("0: # size", "# size"),
        (" 12: # size", "# size"),
        ("[0] NCCL", "[0] NCCL"),
        ("n1:2:3 [0] x", "n1:2:3 [0] x"),
        ("   8   2", "   8   2"),
    ] {
        assert_eq!(without_mark(marked), plain, "{marked}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read(lines in prop::collection::vec(".{0,120}", 0..30)) {
        let mut table = read("#  size  count  type  time  algbw  busbw  error  time  algbw  busbw  error\n");
        lines.iter().for_each(|line| table.line(line));
        prop_assert!(table.open.len() <= 2 * MOST_WORDS);
    }

    #[test]
    fn words_of_a_table_in_any_order_are_read(
        words in prop::collection::vec(prop::sample::select(vec![
            "#", "size", "time", "busbw", "algbw", "#wrong", "8", "1.5", "float", "-1", "\n", "n1:1:2 [0] NCCL INFO x\n", "                                 ",
        ]), 0..80),
    ) {
        let _ = read(&words.join(" "));
    }
}
