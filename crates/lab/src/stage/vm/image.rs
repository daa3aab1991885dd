//! Boot files of a guest with a stock kernel: the kernel, decompressed, and an initramfs with the
//! modules that it needs to mount the host's file system as its root.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cpio::newc;

use super::super::installed::{find, need};
use crate::error::Fail;

/// Modules to load, in this order, each after its dependencies.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_net", "virtio_console", "9pnet_virtio", "9p"];
const BUSYBOX: &str = "busybox";
const PACKAGE: &str = "Debian package linux-image-amd64";
/// File types in a mode.
const S_IFREG: u32 = 0o100_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFCHR: u32 = 0o020_000;
const ELF: &[u8] = b"\x7fELF";
/// Compression formats: magic bytes, and the tool and arguments to decompress. A kernel's length
/// follows its compressed data, so some tools report an error at the end.
const COMPRESSIONS: [(&[u8], &str, &[&str]); 4] = [
    (b"\xfd7zXZ\0", "xz", &["-dc", "--single-stream"]),
    (b"\x28\xb5\x2f\xfd", "zstd", &["-dcq"]),
    (b"\x1f\x8b", "gzip", &["-dcq"]),
    (b"\x02\x21\x4c\x18", "lz4", &["-dcq"]),
];

/// Paths of both files, in the folder of a stage; made once, for its first guest.
#[derive(Clone, Debug)]
pub struct Image {
    /// Argument of `-kernel`.
    pub(super) kernel: PathBuf,
    /// Argument of `-initrd`.
    pub(super) initramfs: PathBuf,
}

impl Image {
    /// 9p mount tag of the host's file system.
    pub(super) const ROOT_TAG: &str = "host";

    /// Writes the boot files of the newest kernel below `root` to `folder`.
    pub(super) fn make(root: &Path, folder: &Path) -> Result<Self, Fail> {
        need(BUSYBOX)?;
        let busybox = find(BUSYBOX).unwrap_or_else(|| BUSYBOX.into());
        let busybox = read(&busybox)?;
        if is_dynamic(&busybox) {
            let what = "busybox is dynamically linked: an initramfs needs a static one";
            return Err(Fail::Missing(format!("{what} (Debian package busybox-static)")));
        }
        let (kernel, modules) = newest_kernel(root)?;
        let modules = Modules::below(&modules, folder)?.with_dependencies(&MODULES)?;
        let image = Self { kernel: folder.join("vmlinux"), initramfs: folder.join("guest.cpio") };
        let cpio = initramfs(&busybox, &modules)
            .map_err(|error| Fail::Over(at_path(&image.initramfs, &error)))?;
        for (path, bytes) in [(&image.kernel, unpack(&kernel, folder)?), (&image.initramfs, cpio)] {
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

/// Returns the paths of the newest kernel below `root` that has modules, and of its modules.
pub fn newest_kernel(root: &Path) -> Result<(PathBuf, PathBuf), Fail> {
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
            "{}: no kernel vmlinuz-VERSION with modules in lib/modules/VERSION ({PACKAGE}; \
             --kernel DIR is a folder with an unpacked package)",
            boot.display()
        ))
    })
}

/// Returns the ELF image in a bzImage, because a guest in emulation takes longer to decompress it
/// than to boot; the unchanged file if it cannot be decompressed here.
///
/// x86 boot protocol: `setup_sects` at 0x1f1, `payload_offset` and `payload_length` at 0x248.
fn unpack(kernel: &Path, folder: &Path) -> Result<Vec<u8>, Fail> {
    let file = read(kernel)?;
    let number = |at: usize| {
        let bytes = file.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let payload = || {
        let sectors = usize::from(*file.get(0x1f1)?) + 1;
        let start = (sectors * 512).checked_add(number(0x248)?)?;
        file.get(start..start.checked_add(number(0x24c)?)?)
    };
    let image = payload().and_then(|payload| decompressed(payload, folder));
    Ok(image.filter(|image| image.starts_with(ELF)).unwrap_or(file))
}

/// Returns decompressed bytes; `None` if the format is unknown or its tool is missing.
fn decompressed(bytes: &[u8], folder: &Path) -> Option<Vec<u8>> {
    let (_, tool, args) = COMPRESSIONS.iter().find(|(magic, ..)| bytes.starts_with(magic))?;
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

/// Whether a program is dynamically linked (ELF `PT_INTERP`).
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
    /// Contents of `modules.builtin`.
    built_in: String,
    root: &'a Path,
    /// Folder for temporary files.
    scratch: &'a Path,
}

/// Returns the name of the module in a file: `virtio_rng` of `virtio-rng.ko.xz`.
fn module_name(file: &str) -> Option<String> {
    let name = file.split_once(".ko")?.0;
    Some(name.rsplit('/').next()?.replace('-', "_"))
}

impl<'a> Modules<'a> {
    /// Lists the modules in a folder `lib/modules/VERSION/kernel`.
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

    /// Returns modules by name and contents, each after its dependencies.
    fn with_dependencies(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>, Fail> {
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
            return Err(Fail::Missing(format!("{root}: no module {name} ({PACKAGE})")));
        };
        if order.iter().any(|(known, _)| known == name) {
            return Ok(());
        }
        let bytes = read(path)?;
        let bytes = decompressed(&bytes, self.scratch).unwrap_or(bytes);
        if !bytes.starts_with(ELF) {
            let what = "cannot be decompressed: install xz, zstd or gzip";
            return Err(Fail::Missing(format!("{} {what}", path.display())));
        }
        // Dependencies of modules have no cycles.
        for name in dependencies(&bytes) {
            self.add(&name.replace('-', "_"), order)?;
        }
        order.push((name.into(), bytes));
        Ok(())
    }
}

/// Returns the dependencies of a module from its section `.modinfo`: an unpacked package has no
/// `modules.dep`.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|bytes| bytes == KEY) else {
        return Vec::new();
    };
    let rest = &module[at + KEY.len()..];
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(0);
    let names = String::from_utf8_lossy(&rest[..end]).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(String::from).collect()
}

/// Returns the initramfs. Its init loads the modules, mounts the host's file system and executes
/// its arguments there.
fn initramfs(busybox: &[u8], modules: &[(String, Vec<u8>)]) -> std::io::Result<Vec<u8>> {
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
        add(folder, S_IFDIR | 0o755, &[], none)?;
    }
    add("dev/console", S_IFCHR | 0o600, &[], (5, 1))?;
    add("busybox", S_IFREG | 0o755, busybox, none)?;
    let mut script = String::from("#!/busybox sh\n");
    for (name, bytes) in modules {
        add(&format!("modules/{name}.ko"), S_IFREG | 0o644, bytes, none)?;
        script += &format!("/busybox insmod /modules/{name}.ko || exit 1\n");
    }
    let options = "trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144";
    script += &format!("/busybox mount -t 9p -o {options} {} /root || exit 1\n", Image::ROOT_TAG);
    script += "exec /busybox switch_root /root \"$@\"\n";
    add("init", S_IFREG | 0o755, script.as_bytes(), none)?;
    newc::trailer(&mut archive)?;
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stage::folder;

    /// A module with as much of its contents as is read here.
    fn module(depends: &str) -> Vec<u8> {
        [ELF, b"...\0license=GPL\0depends=", depends.as_bytes(), b"\0name=x\0"].concat()
    }

    #[test]
    fn modules_follow_their_dependencies() {
        let dir = folder().unwrap();
        let root = dir.path().join("kernel");
        fs::create_dir_all(root.join("net")).unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/lib/part-of-it.ko\n").unwrap();
        for (name, depends) in
            [("a.ko", "b-c,part_of_it"), ("net/b-c.ko", "d"), ("d.ko", ""), ("e.ko", "d")]
        {
            fs::write(root.join(name), module(depends)).unwrap();
        }
        let modules = Modules::below(&root, dir.path()).unwrap();
        let order = modules.with_dependencies(&["a", "e"]).unwrap();
        let names: Vec<_> = order.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["d", "b_c", "a", "e"]);
        let missing = modules.with_dependencies(&["f"]).err().unwrap();
        assert!(matches!(&missing, Fail::Missing(what) if what.contains("no module f")));
        fs::write(root.join("g.ko"), "unknown format").unwrap();
        let modules = Modules::below(&root, dir.path()).unwrap();
        assert!(matches!(modules.with_dependencies(&["g"]), Err(Fail::Missing(_))));
    }

    #[test]
    fn the_newest_kernel_with_modules_is_taken() {
        let dir = folder().unwrap();
        let root = dir.path();
        let none = newest_kernel(root).unwrap_err().to_string();
        assert!(none.contains("linux-image-amd64") && none.contains("--kernel"), "{none}");
        fs::create_dir(root.join("boot")).unwrap();
        for version in ["6.1.0-9-amd64", "6.1.0-10-amd64", "6.12.1-1-amd64"] {
            fs::write(root.join(format!("boot/vmlinuz-{version}")), "").unwrap();
            if !version.starts_with("6.12") {
                let modules = root.join("lib/modules").join(version).join("kernel");
                fs::create_dir_all(modules).unwrap();
            }
        }
        let (kernel, modules) = newest_kernel(root).unwrap();
        assert!(kernel.ends_with("boot/vmlinuz-6.1.0-10-amd64"), "{}", kernel.display());
        assert!(modules.ends_with("lib/modules/6.1.0-10-amd64/kernel"), "{}", modules.display());
    }

    #[test]
    fn a_kernel_is_decompressed_if_possible() {
        let dir = folder().unwrap();
        let image = [ELF, &[7; 5000]].concat();
        let raw = dir.path().join("raw");
        fs::write(&raw, &image).unwrap();
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
        assert_eq!(unpack(&path, dir.path()).unwrap(), image);
        // A payload length beyond the end of the file.
        kernel[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        fs::write(&path, &kernel).unwrap();
        assert_eq!(unpack(&path, dir.path()).unwrap(), kernel);
    }

    #[test]
    fn dynamic_linking_is_detected() {
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
