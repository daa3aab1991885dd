//! Huge pages: reserved while a study runs, and how much of them a process uses.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::machine::{huge_page_kib, huge_pages_free};

const SETTINGS: &str = "/proc/sys/vm";
const PAGES: &str = "nr_hugepages";
/// Free memory may be in pieces, or be the page cache: what makes more of it usable.
const REQUESTS: [&str; 2] = ["drop_caches", "compact_memory"];
const ATTEMPTS: u32 = 5;

/// Pages that the kernel keeps as huge pages; their number before is restored when dropped.
#[derive(Debug)]
pub struct Reserved {
    setting: PathBuf,
    before: u64,
}

impl Reserved {
    /// Reserves so many pages that `mib` MiB are free, or as many as there are. Returns `None` if
    /// enough are free, or if this process may not: it takes root.
    pub fn free(mib: u64) -> Option<Self> {
        let more = pages(mib).saturating_sub(huge_pages_free());
        if more == 0 { None } else { Self::add(Path::new(SETTINGS), more) }
    }

    fn add(settings: &Path, more: u64) -> Option<Self> {
        let setting = settings.join(PAGES);
        let count = || fs::read_to_string(&setting).ok()?.trim().parse::<u64>().ok();
        let before = count()?;
        let wanted = before + more;
        for _ in 0..ATTEMPTS {
            fs::write(&setting, wanted.to_string()).ok()?;
            if count()? >= wanted {
                break;
            }
            for request in REQUESTS {
                // Missing in some kernels.
                let _ = fs::write(settings.join(request), "1");
            }
        }
        Some(Self { setting, before })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.setting, self.before.to_string()) {
            eprintln!("{}: not set to {} again: {error}", self.setting.display(), self.before);
        }
    }
}

/// Number of huge pages of the default size for `mib` MiB; 0 where the kernel has none.
pub fn pages(mib: u64) -> u64 {
    match huge_page_kib() {
        0 => 0,
        kib => (mib * 1024).div_ceil(kib),
    }
}

/// Free huge pages, in MiB.
pub fn free_mib() -> u64 {
    huge_pages_free() * huge_page_kib() / 1024
}

/// Huge pages that a process and its descendants have mapped, in KiB.
pub fn used_kib(pid: u32) -> u64 {
    used_in(Path::new("/proc"), pid)
}

fn used_in(proc: &Path, pid: u32) -> u64 {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut used: HashMap<u32, u64> = HashMap::new();
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let number = |field: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(field))?;
            value.trim().trim_end_matches(" kB").parse::<u64>().ok()
        };
        let parent = number("PPid:").and_then(|parent| u32::try_from(parent).ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
        used.insert(pid, number("HugetlbPages:").unwrap_or(0));
    }
    let (mut all, mut kib) = (vec![pid], 0);
    while let Some(pid) = all.pop() {
        kib += used.remove(&pid).unwrap_or(0);
        all.extend(children.remove(&pid).unwrap_or_default());
    }
    kib
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::folder;

    #[test]
    fn pages_are_reserved_until_the_end() {
        let dir = folder().unwrap();
        let setting = dir.path().join(PAGES);
        let count = || fs::read_to_string(&setting).unwrap().trim().to_string();
        fs::write(&setting, "7\n").unwrap();
        let reserved = Reserved::add(dir.path(), 300).unwrap();
        assert_eq!(count(), "307");
        drop(reserved);
        assert_eq!(count(), "7");
    }

    #[test]
    fn nothing_is_reserved_where_the_kernel_has_no_huge_pages() {
        let dir = folder().unwrap();
        assert!(Reserved::add(dir.path(), 300).is_none());
    }

    #[test]
    fn nothing_is_reserved_for_studies_without_rivals() {
        assert_eq!(pages(0), 0);
        assert!(Reserved::free(0).is_none());
    }

    #[test]
    fn pages_of_descendants_count() {
        let dir = folder().unwrap();
        for (pid, parent, kib) in [(5, 1, 2048), (6, 5, 4096), (7, 6, 8192), (8, 1, 16384)] {
            let folder = dir.path().join(pid.to_string());
            fs::create_dir(&folder).unwrap();
            let status = format!("Name:\tx\nPPid:\t{parent}\nHugetlbPages:\t{kib:>8} kB\n");
            fs::write(folder.join("status"), status).unwrap();
        }
        assert_eq!(used_in(dir.path(), 5), 2048 + 4096 + 8192);
        assert_eq!(used_in(dir.path(), 8), 16384);
        assert_eq!(used_in(dir.path(), 9), 0);
    }
}
