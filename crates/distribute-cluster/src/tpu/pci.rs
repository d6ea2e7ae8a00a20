//! TPU chips of this machine.

use std::fs;
use std::path::Path;

use super::accelerator::Generation;

/// Counts the TPU chips on the PCI bus by the files of sysfs, and returns them with the number of TensorCores in each.
/// Returns `None` if there are none, and for a generation that is unknown.
pub(super) fn chips(devices: &Path) -> Option<(u32, u32)> {
    let id = |device: &Path, name: &str| {
        let text = fs::read_to_string(device.join(name)).ok()?;
        u16::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    let entries = fs::read_dir(devices).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let chips = entries.filter(|device| id(device, "vendor") == Some(GOOGLE));
    let mut generations = chips.filter_map(|chip| Generation::of_pci(id(&chip, "device")?));
    let first = generations.next()?;
    Some((1 + generations.filter(|other| *other == first).count() as u32, first.cores_per_chip()))
}

/// The directory of PCI devices.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";

/// The vendor of TPUs on the PCI bus.
const GOOGLE: u16 = 0x1ae0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_are_counted_by_vendor_and_device() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(chips(&folder.path().join("absent")), None);
        let add = |name: &str, vendor: &str, device: &str| {
            let path = folder.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("vendor"), vendor).unwrap();
            fs::write(path.join("device"), device).unwrap();
        };
        add("0", "0x8086\n", "0x0063\n");
        add("1", "0x1ae0\n", "0x0042\n");
        assert_eq!(chips(folder.path()), None);
        add("2", "0x1ae0\n", "0x0063\n");
        add("3", "0x1ae0\n", "0x0063\n");
        assert_eq!(chips(folder.path()), Some((2, 1)));
        let other = tempfile::tempdir().unwrap();
        fs::create_dir(other.path().join("0")).unwrap();
        fs::write(other.path().join("0/vendor"), "0x1ae0\n").unwrap();
        fs::write(other.path().join("0/device"), "0x005e\n").unwrap();
        assert_eq!(chips(other.path()), Some((1, 2)));
    }
}
