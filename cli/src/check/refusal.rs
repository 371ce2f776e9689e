//! Why a library cannot be opened. The file's headers say more than the loader does.

use super::candidate::{Candidate, Trial};
use super::elf::{Elf, numbers};
use super::place;
use super::probe::{End, Order};
use super::release::{Naming, Release};
use super::verdict::FALLBACK;
use crate::doctor::finding::Finding;
use pinrail_client::failure::Result;
use pinrail_client::net::library::glibc_version;
use std::path::Path;

/// Nothing could be opened: the file says more than the loader does.
pub fn judge(candidate: &Candidate, trial: &Trial<'_>) -> Result<Finding> {
    if let End::Lost { step, how } = &candidate.end {
        return Ok(Finding::problem(
            "search",
            format!("{step} takes the process with it or never returns"),
            how.clone(),
            "report it to whoever made the plugin",
        ));
    }
    // The loader's words begin with the name.
    let tried: Vec<_> = candidate.refused.iter().map(|(_, why)| why.as_str()).collect();
    let tried = tried.join("; ");
    let Some((path, elf)) = &candidate.file else {
        return Ok(not_found(candidate, trial.release, tried));
    };
    let file = path.display();
    let problem = |check, what: String, evidence: String, remedy: String| {
        Finding::problem(check, format!("{what}, and {FALLBACK}"), evidence, remedy)
    };
    let elf = match elf {
        Ok(elf) => elf,
        Err(why) => {
            return Ok(problem(
                "file",
                format!("{file} cannot be loaded: {why}"),
                tried,
                "name the plugin's file, readable for whoever runs the job".into(),
            ));
        }
    };
    let ours = Elf { machine: Elf::this_machine(), ..Elf::default() }.machine_name();
    if elf.bits != 64 || !elf.native_order || elf.machine != Elf::this_machine() {
        return Ok(problem(
            "architecture",
            format!("{file} is for another machine"),
            format!("it is for {}, {} bit; this is {ours}, 64 bit", elf.machine_name(), elf.bits),
            format!("use a build for {ours}"),
        ));
    }
    if !elf.shared {
        return Ok(problem(
            "file",
            format!("{file} is no shared object"),
            tried,
            "name the plugin's file".into(),
        ));
    }
    let here = glibc_version();
    if let (Some(asked), Some(has)) = (elf.glibc(), numbers(&here))
        && asked > has
    {
        return Ok(problem(
            "glibc",
            format!("{file} needs a newer C library"),
            format!("it asks for GLIBC_{}.{}, and this is {here}", asked.0, asked.1),
            "use a build for this distribution or an older one, or a newer image".into(),
        ));
    }
    let missing = missing(path, elf, trial)?;
    if !missing.is_empty() {
        return Ok(problem(
            "needed",
            format!("{file} needs libraries that are not found: {}", missing.join(", ")),
            tried,
            format!("install them, or put their folders into LD_LIBRARY_PATH {}", now()),
        ));
    }
    let remedy = if tried.contains("undefined symbol") {
        "NCCL resolves every symbol at once: link the plugin against what defines this one, or use a build that is"
    } else {
        "the loader's own words say what is wrong; the file's mount may forbid running what lies on it (noexec)"
    };
    Ok(problem("file", format!("{file} cannot be loaded"), tried, remedy.into()))
}

fn now() -> String {
    place::loader_path().map_or_else(|| "(not set)".to_owned(), |path| format!("(now {path})"))
}

/// Libraries that a file needs and the loader cannot open.
fn missing(file: &Path, elf: &Elf, trial: &Trial<'_>) -> Result<Vec<String>> {
    let mut missing = Vec::new();
    for name in &elf.needed {
        if place::in_runpath(file, elf, name) {
            continue;
        }
        let (_, end) = trial.ask(&Order::Need { name: name.clone() })?;
        if let End::Failed { text, .. } = end
            && text.contains("cannot open shared object file")
        {
            // Its own words name a library that this one needs in turn.
            let culprit = text.split(':').next().unwrap_or(name).to_owned();
            if !missing.contains(&culprit) {
                missing.push(culprit);
            }
        }
    }
    Ok(missing)
}

fn not_found(candidate: &Candidate, release: &Release, tried: String) -> Finding {
    let plugin = &candidate.plugin;
    let names = release.names(plugin);
    let remedy = if let Some(name) = place::beside(&names) {
        format!(
            "the current folder is not searched: NCCL_NET_PLUGIN=./{name}, or better the whole path"
        )
    } else if plugin.contains('/') && release.naming <= Naming::Inserted {
        format!(
            "NCCL {release} takes no path: put the folder into LD_LIBRARY_PATH, and into NCCL_NET_PLUGIN what stands \
             between libnccl-net- and .so"
        )
    } else if plugin.contains('/') {
        "give the path as it is inside the container and on every host".to_owned()
    } else {
        let file = names.last().map_or(plugin.as_str(), String::as_str);
        format!("put the folder that holds {file} into LD_LIBRARY_PATH {}", now())
    };
    Finding::problem(
        "search",
        format!("NCCL finds no plugin {plugin:?}, and {FALLBACK}"),
        tried,
        remedy,
    )
}
