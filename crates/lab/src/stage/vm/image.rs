//! What a stock kernel boots from: the kernel itself, unpacked, and an archive with the modules
//! that it needs to reach the host's file system, in which everything else is.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cpio::newc;

use super::super::installed::{find, need};
use crate::error::Fail;

/// Loaded in this order, each after those that it needs.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_net", "virtio_console", "9pnet_virtio", "9p"];
const BUSYBOX: &str = "busybox";
const PACKAGE: &str = "Debian package linux-image-amd64";
/// Kinds of file, as their modes tell them.
const FILE: u32 = 0o100_000;
const FOLDER: u32 = 0o040_000;
const CHARACTERS: u32 = 0o020_000;
const ELF: &[u8] = b"\x7fELF";
/// How files are packed: their first bytes, and what unpacks them. Kernels have their unpacked
/// length behind the last byte, so not all of these end well.
const PACKED: [(&[u8], &str, &[&str]); 4] = [
    (b"\xfd7zXZ\0", "xz", &["-dc", "--single-stream"]),
    (b"\x28\xb5\x2f\xfd", "zstd", &["-dcq"]),
    (b"\x1f\x8b", "gzip", &["-dcq"]),
    (b"\x02\x21\x4c\x18", "lz4", &["-dcq"]),
];

/// Both, as files of a stage; made once, when the first guest is started.
#[derive(Clone, Debug)]
pub struct Image {
    /// For `-kernel`.
    pub(super) kernel: PathBuf,
    /// For `-initrd`.
    pub(super) archive: PathBuf,
}

impl Image {
    /// The name of the host's file system among 9p's.
    pub(super) const ROOT_TAG: &str = "host";

    /// Makes it of the kernel below `root`.
    pub(super) fn make(root: &Path, folder: &Path) -> Result<Self, Fail> {
        need(BUSYBOX)?;
        let busybox = find(BUSYBOX).unwrap_or_else(|| BUSYBOX.into());
        let busybox = read(&busybox)?;
        if is_dynamic(&busybox) {
            let what = "busybox needs libraries, which a guest does not have before its root";
            return Err(Fail::Missing(format!("{what} (Debian package busybox-static)")));
        }
        let (kernel, modules) = kernel_below(root)?;
        let modules = Modules::below(&modules, folder)?.in_order(&MODULES)?;
        let image = Self { kernel: folder.join("vmlinux"), archive: folder.join("guest.cpio") };
        let archive = archive(&busybox, &modules)
            .map_err(|error| Fail::Over(at_path(&image.archive, &error)))?;
        for (path, bytes) in [(&image.kernel, plain(&kernel, folder)?), (&image.archive, archive)] {
            fs::write(path, bytes).map_err(|error| Fail::Over(at_path(path, &error)))?;
        }
        Ok(image)
    }
}

fn at_path(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn read(path: &Path) -> Result<Vec<u8>, Fail> {
    fs::read(path).map_err(|error| Fail::Cell(at_path(path, &error)))
}

/// The newest kernel that has its modules: both paths.
pub fn kernel_below(root: &Path) -> Result<(PathBuf, PathBuf), Fail> {
    let boot = root.join("boot");
    let names = fs::read_dir(&boot).into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<_> = names
        .filter_map(|name| {
            let version = name.strip_prefix("vmlinuz-")?;
            let modules = root.join("lib/modules").join(version).join("kernel");
            let usr = root.join("usr/lib/modules").join(version).join("kernel");
            let modules = [modules, usr].into_iter().find(|path| path.is_dir())?;
            let numbers = version.split(|c: char| !c.is_ascii_digit());
            let numbers: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
            Some((numbers, boot.join(name), modules))
        })
        .collect();
    found.sort();
    found.pop().map(|(_, kernel, modules)| (kernel, modules)).ok_or_else(|| {
        Fail::Missing(format!(
            "{}: no kernel vmlinuz-VERSION there with lib/modules/VERSION ({PACKAGE}; \
             --kernel DIR names a folder that it is unpacked in)",
            boot.display()
        ))
    })
}

/// The ELF image inside of a kernel file, which a guest in emulation takes longer to unpack than to
/// boot. The file as it is where nothing here can unpack it.
///
/// Setup sectors at 0x1f1, offset and length of what is packed at 0x248 (x86 boot protocol).
fn plain(kernel: &Path, folder: &Path) -> Result<Vec<u8>, Fail> {
    let packed = read(kernel)?;
    let number = |at: usize| {
        let bytes = packed.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let inner = || {
        let sectors = usize::from(*packed.get(0x1f1)?) + 1;
        let start = (sectors * 512).checked_add(number(0x248)?)?;
        packed.get(start..start.checked_add(number(0x24c)?)?)
    };
    let image = inner().and_then(|inner| unpacked(inner, folder));
    Ok(image.filter(|image| image.starts_with(ELF)).unwrap_or(packed))
}

/// What comes out of a tool; none where these bytes are not packed, or the tool is not there.
fn unpacked(bytes: &[u8], folder: &Path) -> Option<Vec<u8>> {
    let (_, tool, args) = PACKED.iter().find(|(magic, ..)| bytes.starts_with(magic))?;
    let path = folder.join("packed");
    fs::write(&path, bytes).ok()?;
    let done = Command::new(tool)
        .args(*args)
        .stdin(File::open(&path).ok()?)
        .stderr(Stdio::null())
        .output();
    let _ = fs::remove_file(&path);
    Some(done.ok()?.stdout)
}

/// Whether a program asks for a loader of libraries (ELF, `PT_INTERP`).
fn is_dynamic(elf: &[u8]) -> bool {
    const PT_INTERP: usize = 3;
    let number = |at: usize, size: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(size)?)?;
        Some(bytes.iter().rev().fold(0, |all, byte| all << 8 | usize::from(*byte)))
    };
    let headers = || Some((number(32, 8)?, number(54, 2)?, number(56, 2)?));
    headers().is_some_and(|(start, size, count)| {
        (0..count).any(|i| number(start.saturating_add(i * size), 4) == Some(PT_INTERP))
    })
}

/// A kernel's modules.
struct Modules<'a> {
    /// Paths by name, with `_` for `-`.
    paths: BTreeMap<String, PathBuf>,
    /// Names of those that are part of the kernel.
    built_in: String,
    root: &'a Path,
    /// For what has to be unpacked.
    scratch: &'a Path,
}

/// A file's name as a module's: `virtio-rng.ko.xz` is `virtio_rng`.
fn module_name(file: &str) -> Option<String> {
    let name = file.split_once(".ko")?.0;
    Some(name.rsplit('/').next()?.replace('-', "_"))
}

impl<'a> Modules<'a> {
    /// All in a folder `lib/modules/VERSION/kernel`.
    fn below(root: &'a Path, scratch: &'a Path) -> Result<Self, Fail> {
        let mut paths = BTreeMap::new();
        let mut folders = vec![root.to_path_buf()];
        while let Some(folder) = folders.pop() {
            let all =
                fs::read_dir(&folder).map_err(|error| Fail::Cell(at_path(&folder, &error)))?;
            for entry in all.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(entry.path());
                } else if let Some(name) = module_name(&entry.file_name().to_string_lossy()) {
                    paths.insert(name, entry.path());
                }
            }
        }
        let built_in = fs::read_to_string(root.with_file_name("modules.builtin"));
        Ok(Self { paths, built_in: built_in.unwrap_or_default(), root, scratch })
    }

    /// These and all that they need, each behind what it needs.
    fn in_order(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>, Fail> {
        let mut order = Vec::new();
        names.iter().try_for_each(|name| self.add(name, &mut order))?;
        Ok(order)
    }

    fn add(&self, name: &str, order: &mut Vec<(String, Vec<u8>)>) -> Result<(), Fail> {
        let Some(path) = self.paths.get(name) else {
            let mut built_in = self.built_in.lines().filter_map(module_name);
            if built_in.any(|known| known == name) {
                return Ok(());
            }
            let root = self.root.display();
            return Err(Fail::Missing(format!("{root}: no module {name} there ({PACKAGE})")));
        };
        if order.iter().any(|(known, _)| known == name) {
            return Ok(());
        }
        let bytes = read(path)?;
        let bytes = unpacked(&bytes, self.scratch).unwrap_or(bytes);
        if !bytes.starts_with(ELF) {
            let what = "is packed in a way that no tool here unpacks (xz, zstd, gzip)";
            return Err(Fail::Missing(format!("{} {what}", path.display())));
        }
        // No module of a kernel's own needs itself, by whatever way.
        for needed in needs(&bytes) {
            self.add(&needed.replace('-', "_"), order)?;
        }
        order.push((name.into(), bytes));
        Ok(())
    }
}

/// What a module says that it needs, in its section `.modinfo`. A package that is only unpacked has
/// no `modules.dep`.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|bytes| bytes == KEY) else {
        return Vec::new();
    };
    let rest = &module[at + KEY.len()..];
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
    let names = String::from_utf8_lossy(&rest[..end]).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(String::from).collect()
}

/// The first program loads the modules, and goes on with the program named by its first argument
/// on the host's root.
fn archive(busybox: &[u8], modules: &[(String, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
    let mut archive = Vec::new();
    let mut add = |path: &str, mode, bytes: &[u8], (major, minor)| {
        let entry = newc::Builder::new(path).mode(mode).rdev_major(major).rdev_minor(minor);
        let size = u32::try_from(bytes.len()).map_err(std::io::Error::other)?;
        let mut file = entry.write(&mut archive, size);
        file.write_all(bytes)?;
        file.finish().map(|_| ())
    };
    let none = (0, 0);
    for folder in ["dev", "modules", "root"] {
        add(folder, FOLDER | 0o755, &[], none)?;
    }
    add("dev/console", CHARACTERS | 0o600, &[], (5, 1))?;
    add("busybox", FILE | 0o755, busybox, none)?;
    let mut script = String::from("#!/busybox sh\n");
    for (name, bytes) in modules {
        add(&format!("modules/{name}.ko"), FILE | 0o644, bytes, none)?;
        script += &format!("/busybox insmod /modules/{name}.ko || exit 1\n");
    }
    let how = "trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144";
    script += &format!("/busybox mount -t 9p -o {how} {} /root || exit 1\n", Image::ROOT_TAG);
    script += "exec /busybox switch_root /root \"$@\"\n";
    add("init", FILE | 0o755, script.as_bytes(), none)?;
    newc::trailer(&mut archive)?;
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::folder;

    /// A module, as far as anybody here looks.
    fn module(needs: &str) -> Vec<u8> {
        [ELF, b"...\0license=GPL\0depends=", needs.as_bytes(), b"\0name=x\0"].concat()
    }

    #[test]
    fn modules_come_behind_what_they_need() {
        let dir = folder().unwrap();
        let root = dir.path().join("kernel");
        fs::create_dir_all(root.join("net")).unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/lib/part-of-it.ko\n").unwrap();
        for (name, needs) in
            [("a.ko", "b-c,part_of_it"), ("net/b-c.ko", "d"), ("d.ko", ""), ("e.ko", "d")]
        {
            fs::write(root.join(name), module(needs)).unwrap();
        }
        let modules = Modules::below(&root, dir.path()).unwrap();
        let order = modules.in_order(&["a", "e"]).unwrap();
        let names: Vec<_> = order.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["d", "b_c", "a", "e"]);
        let missing = modules.in_order(&["f"]).err().unwrap();
        assert!(matches!(&missing, Fail::Missing(what) if what.contains("no module f")));
        fs::write(root.join("g.ko"), "nothing known").unwrap();
        let modules = Modules::below(&root, dir.path()).unwrap();
        assert!(matches!(modules.in_order(&["g"]), Err(Fail::Missing(_))));
    }

    #[test]
    fn the_newest_kernel_with_modules_is_taken() {
        let dir = folder().unwrap();
        let root = dir.path();
        let none = kernel_below(root).unwrap_err().to_string();
        assert!(none.contains("linux-image-amd64") && none.contains("--kernel"), "{none}");
        fs::create_dir(root.join("boot")).unwrap();
        for version in ["6.1.0-9-amd64", "6.1.0-10-amd64", "6.12.1-1-amd64"] {
            fs::write(root.join(format!("boot/vmlinuz-{version}")), "").unwrap();
            if !version.starts_with("6.12") {
                let modules = root.join("lib/modules").join(version).join("kernel");
                fs::create_dir_all(modules).unwrap();
            }
        }
        let (kernel, modules) = kernel_below(root).unwrap();
        assert!(kernel.ends_with("boot/vmlinuz-6.1.0-10-amd64"), "{}", kernel.display());
        assert!(modules.ends_with("lib/modules/6.1.0-10-amd64/kernel"), "{}", modules.display());
    }

    #[test]
    fn a_kernel_is_unpacked_or_left_as_it_is() {
        let dir = folder().unwrap();
        let inner = [ELF, &[7; 5000]].concat();
        let raw = dir.path().join("raw");
        fs::write(&raw, &inner).unwrap();
        let gzip = Command::new("gzip").arg("-c").stdin(File::open(&raw).unwrap()).output();
        let packed = gzip.unwrap().stdout;
        let mut kernel = vec![0; 1024];
        kernel[0x1f1] = 1;
        kernel[0x248..0x24c].copy_from_slice(&100_u32.to_le_bytes());
        let length = u32::try_from(packed.len()).unwrap();
        kernel[0x24c..0x250].copy_from_slice(&length.to_le_bytes());
        kernel.extend([[0; 100].as_slice(), &packed, b"behind it"].concat());
        let path = dir.path().join("vmlinuz");
        fs::write(&path, &kernel).unwrap();
        assert_eq!(plain(&path, dir.path()).unwrap(), inner);
        // What it says of itself is beyond its end.
        kernel[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        fs::write(&path, &kernel).unwrap();
        assert_eq!(plain(&path, dir.path()).unwrap(), kernel);
    }

    #[test]
    fn a_program_that_needs_libraries_is_seen() {
        let mut elf = vec![0; 200];
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = 2;
        elf[64] = 1;
        assert!(!is_dynamic(&elf));
        elf[64 + 56] = 3;
        assert!(is_dynamic(&elf));
        assert!(!is_dynamic(b"short"));
    }
}
