//! The manual page, from what the command says of itself and from the table of settings.

use super::USAGE;
use crate::env::{NUMBERS, TEXTS};

/// The page, in the language of man.
pub fn page() -> String {
    let mut lines = USAGE.lines();
    let (name, what) = lines.next().and_then(|line| line.split_once(": ")).unwrap_or_default();
    let mut page = format!(
        ".TH {} 1 \"\" \"{name} {}\"\n.SH NAME\n{} \\- {}\n.SH COMMANDS\n",
        escaped(name),
        env!("CARGO_PKG_VERSION"),
        escaped(name),
        escaped(what)
    );
    for line in lines {
        match line.strip_prefix("  ") {
            // Two blanks or more set the meaning off from the words.
            Some(command) => {
                let (words, meaning) = command.split_once("  ").unwrap_or((command, ""));
                let (words, meaning) = match command.split_once(" INDEX ADDRESS ") {
                    Some((begin, meaning)) => (format!("{begin} INDEX ADDRESS"), meaning),
                    None => (words.to_owned(), meaning),
                };
                let (words, meaning) = (escaped(words.trim()), escaped(meaning.trim()));
                page += &format!(".TP\n\\fB{words}\\fR\n{meaning}\n");
            }
            None if line.is_empty() => page += ".PP\n",
            None => page += &format!("{}\n", escaped(line)),
        }
    }
    page += ".SH ENVIRONMENT\nRead by the library when a process opens its list of devices.\n";
    for one in NUMBERS {
        let range = format!("{} to {}, default {}", one.min, one.max, one.default);
        page += &variable(one.name, &range, one.doc);
    }
    for one in TEXTS {
        let default = if one.default.is_empty() { "not set" } else { one.default };
        page += &variable(one.name, &format!("default {default}"), one.doc);
    }
    page + ".SH SEE ALSO\n.BR pinrail (1),\n.BR pinrail\\-bench (1)\n"
}

fn variable(name: &str, range: &str, doc: &str) -> String {
    let name = format!("SOFTRNIC_{name}");
    format!(".TP\n\\fB{}\\fR ({})\n{}\n", escaped(&name), escaped(range), escaped(doc))
}

/// Text in which nothing is a command of man's.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_and_setting_is_on_the_page() {
        let page = page();
        for line in USAGE.lines().filter_map(|line| line.strip_prefix("  softrnic ")) {
            let word = line.split(' ').next().unwrap();
            assert!(page.contains(&format!("\\fBsoftrnic {}", escaped(word))), "{line}");
        }
        assert!(page.contains("INDEX ADDRESS\\fR\nchanges an entry of a GID table\n"), "{page}");
        for name in NUMBERS.iter().map(|one| one.name).chain(TEXTS.iter().map(|one| one.name)) {
            assert!(page.contains(&format!(".TP\n\\fBSOFTRNIC_{name}\\fR (")), "{name}");
        }
        assert!(page.contains("SOFTRNIC_DEVICES\\fR (0 to 16, default 1)"), "{page}");
        // A line that begins with a dot is a command, and only those meant so are.
        for line in page.lines().filter(|line| line.starts_with('.')) {
            assert!([".TH", ".SH", ".TP", ".PP", ".BR"].contains(&&line[..3]), "{line}");
        }
    }
}
