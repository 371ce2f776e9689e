//! What only the verbs library can tell. It is asked on the host itself and kept in a bundle, so that a captured tree
//! can be judged elsewhere.

use super::heard::heard;
use nccl_net_pinrail::config::Settings;
use nccl_net_pinrail::host::inside::follow;
use nccl_net_pinrail::host::plain;
use nccl_net_pinrail::transport::device::discover;
use nccl_net_pinrail::verbs::Verbs;
use nccl_net_pinrail::verbs::context::DeviceList;
use nccl_net_pinrail::verbs::fork::ForkAnswer;
use nccl_net_pinrail::verbs::library::DEFAULT_LIBRARY;
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};

/// Where a bundle keeps it, below its root.
pub const FILE: &str = "pinrail/verbs.json";

/// It is never longer; a captured tree may hold anything.
const LONGEST: u64 = 1 << 20;

/// A device that the library lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Why it cannot be opened.
    pub error: Option<String>,
}

/// What the library says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerbsFacts {
    /// The name it was asked for by.
    pub asked: String,
    /// Its file, links resolved.
    pub file: Option<PathBuf>,
    /// Why it cannot be used.
    pub error: Option<String>,
    /// Its devices.
    pub devices: Vec<Listed>,
    /// Ports that the plugin would offer to NCCL, with their speed in Mb/s; `None`: it was not asked.
    pub offered: Option<Vec<(String, u32)>>,
    /// What it says of ports that it does not offer.
    pub left_out: Vec<String>,
    /// Whether it says that the kernel copies pinned pages for a forked child.
    pub copies_for_children: Option<bool>,
}

impl VerbsFacts {
    /// Asks the library that the settings name.
    pub fn of_process(settings: &Settings) -> Self {
        let asked = settings.verbs_lib.as_deref().unwrap_or_else(|| Path::new(DEFAULT_LIBRARY));
        let mut facts = Self { asked: asked.to_string_lossy().into_owned(), ..Self::default() };
        let verbs = match Verbs::load(settings.verbs_lib.as_deref()) {
            Ok(verbs) => verbs,
            Err(error) => {
                facts.error = Some(error.to_string());
                return facts;
            }
        };
        facts.file = verbs.file();
        facts.copies_for_children = match verbs.fork_answer() {
            Some(ForkAnswer::Unneeded) => Some(true),
            Some(ForkAnswer::Disabled | ForkAnswer::Enabled) => Some(false),
            Some(ForkAnswer::Other(_)) | None => None,
        };
        match DeviceList::get(&verbs) {
            Ok(list) => {
                let listed = |index| Listed {
                    name: list.name(index),
                    error: list.open(index).err().map(|error| error.to_string()),
                };
                facts.devices = (0..list.len()).map(listed).collect();
            }
            Err(error) => facts.error = Some(error.to_string()),
        }
        let (found, lines) = heard(|| discover(&verbs, settings));
        facts.left_out = lines.into_iter().filter(|line| line.contains(" left out")).collect();
        if let Ok(devices) = found {
            let offered = |device: &std::sync::Arc<nccl_net_pinrail::transport::device::Device>| {
                (device.port.label.clone(), device.speed)
            };
            facts.offered = Some(devices.iter().map(offered).collect());
        }
        facts
    }

    /// What a bundle holds; `None`: nothing.
    ///
    /// # Errors
    /// It is damaged.
    pub fn of_tree(root: &Path) -> Result<Option<Self>, String> {
        let path = follow(root, Path::new(FILE));
        let bytes = match plain::read(&path, LONGEST) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{} cannot be read: {error}", path.display())),
        };
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|error| format!("{} is damaged: {error}", path.display()))?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let array = |name: &str| value[name].as_array().cloned().unwrap_or_default();
        let device = |value: &Value| {
            Some(Listed { name: text(&value["name"])?, error: text(&value["error"]) })
        };
        let offered =
            |value: &Value| Some((text(&value["port"])?, value["mbps"].as_u64()?.try_into().ok()?));
        Ok(Some(Self {
            asked: text(&value["asked"]).unwrap_or_else(|| DEFAULT_LIBRARY.to_owned()),
            file: text(&value["file"]).map(PathBuf::from),
            error: text(&value["error"]),
            devices: array("devices").iter().filter_map(device).collect(),
            offered: value["offered"]
                .as_array()
                .map(|ports| ports.iter().filter_map(offered).collect()),
            left_out: array("left_out").iter().filter_map(text).collect(),
            copies_for_children: value["copies_for_children"].as_bool(),
        }))
    }

    /// For a bundle, and for the report.
    pub fn document(&self) -> Value {
        let devices: Vec<_> = self
            .devices
            .iter()
            .map(|device| json!({ "name": device.name, "error": device.error }))
            .collect();
        let offer = |(port, mbps): &(String, u32)| json!({ "port": port, "mbps": mbps });
        let offered: Option<Vec<_>> =
            self.offered.as_ref().map(|all| all.iter().map(offer).collect());
        json!({
            "asked": self.asked,
            "file": self.file.as_ref().map(|file| file.to_string_lossy()),
            "error": self.error,
            "devices": devices,
            "offered": offered,
            "left_out": self.left_out,
            "copies_for_children": self.copies_for_children,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_is_read_back() {
        let facts = VerbsFacts {
            asked: "libibverbs.so.1".into(),
            file: Some("/usr/lib/libibverbs.so.1.14.44.0".into()),
            error: Some("e".into()),
            devices: vec![Listed { name: "mlx5_0".into(), error: None }],
            offered: Some(vec![("mlx5_0:1".into(), 400_000)]),
            left_out: vec!["mlx5_1:1 is left out: no GID".into()],
            copies_for_children: Some(false),
        };
        let root = std::env::temp_dir().join(format!("pinrail-verbs-{}", std::process::id()));
        std::fs::create_dir_all(root.join("pinrail")).unwrap();
        assert_eq!(VerbsFacts::of_tree(&root), Ok(None));
        std::fs::write(root.join(FILE), facts.document().to_string()).unwrap();
        assert_eq!(VerbsFacts::of_tree(&root), Ok(Some(facts)));
        std::fs::write(root.join(FILE), "{").unwrap();
        assert!(VerbsFacts::of_tree(&root).unwrap_err().contains("is damaged"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
