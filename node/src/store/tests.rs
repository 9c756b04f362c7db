use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use shoal_model::synthetic::SyntheticModel;
use tempfile::TempDir;

use super::*;
use crate::exit::{Exit, Failure};

fn go(_: Progress<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A small GGUF file; `seed` makes its bytes and so its digest.
fn gguf(folder: &TempDir, name: &str, seed: u32) -> PathBuf {
    let path = folder.path().join(name);
    let model = SyntheticModel { layers: 2, context: 64, seed: seed.into(), ..SyntheticModel::default() };
    model.write(&path).unwrap();
    path
}

fn store(folder: &TempDir) -> ModelStore {
    ModelStore::open(&folder.path().join("models"))
}

fn blob_of(bytes: &[u8]) -> (String, u64) {
    use sha2::Digest;
    (data_encoding::HEXLOWER.encode(&sha2::Sha256::digest(bytes)), bytes.len() as u64)
}

/// Puts `bytes` into the store as what `digest` and `size` announce.
fn obtain(store: &ModelStore, (digest, size): (&str, u64), bytes: &[u8]) -> Result<PathBuf, StoreError> {
    let wanted = store.wanted("m", digest, size);
    let mut on_progress = go;
    let mut watch = Watch { on_progress: &mut on_progress };
    wanted.obtain("a test", &mut watch, |part| {
        part.copy(&mut &bytes[..]).map_err(|error| error.of(&wanted, "a test"))
    })
}

fn files(store: &ModelStore) -> Vec<String> {
    let entries = fs::read_dir(store.root().join("blobs")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn an_added_file_is_listed_found_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (store(&folder), gguf(&folder, "My Model.Q4_1.gguf", 1));
    let added = store.add(&file, None, &mut go).unwrap();
    assert_eq!(added.model, "my-model.q4_1");
    assert_eq!(store.path("my-model.q4_1").unwrap(), added);
    assert_eq!(store.verify("my-model.q4_1", &mut go).unwrap(), added);
    let list = store.list().unwrap();
    let entry = list.iter().find(|model| model.id == "my-model.q4_1").unwrap();
    assert_eq!((entry.state, entry.layers, entry.max_context), (ModelState::Present, Some(2), Some(64)));
    assert!(list.iter().any(|model| model.id == "smollm2-135m"));
    // The user's own file may go.
    fs::remove_file(file).unwrap();
    assert_eq!(fs::metadata(store.path("my-model.q4_1").unwrap().path).unwrap().len(), added.bytes);
}

#[test]
fn a_file_added_in_place_is_not_copied_and_still_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (store(&folder), gguf(&folder, "m.gguf", 1));
    store.add_in_place(&file, None, &mut go).unwrap();
    assert_eq!(files(&store), [""; 0]);
    store.path("m").unwrap();
    gguf(&folder, "m.gguf", 2);
    assert!(matches!(store.path("m"), Err(StoreError::Broken { .. })));
}

#[test]
fn names_are_checked_and_kept_apart() {
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (store(&folder), gguf(&folder, "m.gguf", 1));
    for name in ["", "../m", "a/b", ".hidden", "-x", "x.", "a b", &"x".repeat(65)] {
        assert!(matches!(store.add(&file, Some(name), &mut go), Err(StoreError::BadName { .. })), "{name}");
    }
    store.add(&file, Some("m"), &mut go).unwrap();
    store.add(&file, Some("m"), &mut go).unwrap();
    let other = gguf(&folder, "other.gguf", 2);
    assert!(matches!(store.add(&other, Some("m"), &mut go), Err(StoreError::NameTaken { .. })));
    assert!(matches!(store.add(&other, Some("smollm2-135m"), &mut go), Err(StoreError::NameTaken { .. })));
}

#[test]
fn unknown_models_are_answered_with_the_known() {
    let folder = tempfile::tempdir().unwrap();
    let failure = Failure::from(store(&folder).path("gpt-17").unwrap_err());
    assert_eq!(failure.exit, Exit::Unknown);
    assert!(failure.message.contains("smollm2-135m"), "{}", failure.message);
}

#[test]
fn a_bad_file_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = gguf(&folder, "m.gguf", 1);
    let whole = fs::read(&file).unwrap();
    for (bytes, word) in
        [(&whole[..whole.len() / 2], "truncated"), (b"<html>not found", "GGUF"), (b"", "open")]
    {
        fs::write(&file, bytes).unwrap();
        let failure = Failure::from(store(&folder).add(&file, None, &mut go).unwrap_err());
        assert_eq!(failure.exit, Exit::BadModel);
        assert!(failure.message.contains(word), "{word}: {}", failure.message);
    }
    assert_eq!(store(&folder).list().unwrap().len(), CATALOGUE.len());
}

#[test]
fn a_blob_with_a_flipped_bit_or_cut_short_is_never_used() {
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (store(&folder), gguf(&folder, "m.gguf", 1));
    let good = store.add(&file, None, &mut go).unwrap();
    let whole = fs::read(&good.path).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    for bytes in [&flipped[..], &whole[..whole.len() / 2]] {
        fs::remove_file(&good.path).unwrap();
        fs::write(&good.path, bytes).unwrap();
        assert!(matches!(store.path("m"), Err(StoreError::Broken { .. })));
        assert!(matches!(store.verify("m", &mut go), Err(StoreError::Broken { .. })));
        // Adding the good file again mends it.
        store.add(&file, None, &mut go).unwrap();
        assert_eq!(store.path("m").unwrap(), good);
    }
}

#[test]
fn what_comes_with_other_bytes_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    let (digest, bytes) = blob_of(b"the right bytes");
    for wrong in [&b"the wrong bytes"[..], b"too short", b"much longer than was announced"] {
        assert!(matches!(obtain(&store, (&digest, bytes), wrong), Err(StoreError::Source { .. })));
        assert_eq!(files(&store), [""; 0]);
    }
    let path = obtain(&store, (&digest, bytes), b"the right bytes").unwrap();
    assert_eq!(fs::read(path).unwrap(), b"the right bytes");
}

#[test]
fn a_part_left_by_a_killed_process_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    let (digest, bytes) = blob_of(b"new");
    fs::create_dir_all(store.root().join("blobs")).unwrap();
    fs::write(store.root().join("blobs").join(format!("{digest}.part")), b"a longer old one").unwrap();
    obtain(&store, (&digest, bytes), b"new").unwrap();
    assert_eq!(files(&store), [format!("sha256-{digest}")]);
}

#[test]
fn of_many_that_want_the_same_file_one_loads_it() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder);
    let content = vec![7; 3 << 20];
    let (digest, bytes) = blob_of(&content);
    let (loads, start) = (AtomicUsize::new(0), Barrier::new(4));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let wanted = store.wanted("m", &digest, bytes);
                let mut on_progress = go;
                start.wait();
                let path = wanted.obtain("a test", &mut Watch { on_progress: &mut on_progress }, |part| {
                    loads.fetch_add(1, Ordering::SeqCst);
                    part.copy(&mut &content[..]).map_err(|error| error.of(&wanted, "a test"))
                });
                assert_eq!(fs::read(path.unwrap()).unwrap(), content);
            });
        }
    });
    assert_eq!(loads.into_inner(), 1);
    assert_eq!(files(&store), [format!("sha256-{digest}")]);
}

#[test]
fn too_little_disk_is_said_before_anything_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(&folder);
    store.free_bytes = |_| Ok(1_000_000);
    let (digest, bytes) = blob_of(b"x");
    let failure = Failure::from(obtain(&store, (&digest, bytes), b"x").unwrap_err());
    assert!(failure.message.contains("1.00 MB free"), "{}", failure.message);
    assert!(failure.fix.unwrap().contains("--model-dir"));
    assert_eq!(files(&store), [""; 0]);
    // Real free space is a number that makes sense.
    assert!(blob::free_bytes(folder.path()).unwrap() > 0);
}

#[test]
fn stopping_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (store(&folder), gguf(&folder, "m.gguf", 1));
    let mut stop_at_copy = |progress: Progress<'_>| match progress.phase {
        Phase::Copying => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    assert!(matches!(store.add(&file, None, &mut stop_at_copy), Err(StoreError::Stopped)));
    assert_eq!(files(&store), [""; 0]);
}

/// Runs itself in a mount namespace of its own where the store lies on a read-only file system; tests run as root, whom
/// permissions do not stop.
#[cfg(target_os = "linux")]
#[test]
fn a_read_only_store_is_read_and_says_why_it_is_not_written() {
    const MARK: &str = "SHOAL_TEST_READ_ONLY_STORE";
    if let Some(root) = std::env::var_os(MARK) {
        let store = ModelStore::open(Path::new(&root));
        store.path("m").unwrap();
        let (digest, bytes) = blob_of(b"x");
        let failure = Failure::from(obtain(&store, (&digest, bytes), b"x").unwrap_err());
        assert!(failure.message.contains("read-only"), "{}", failure.message);
        assert!(failure.fix.unwrap().contains("--model-dir"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (store, file) = (store(&folder), gguf(&folder, "m.gguf", 1));
    store.add(&file, None, &mut go).unwrap();
    let mount =
        "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" || exit 77; shift; exec \"$@\"";
    let child = Command::new("unshare")
        .args(["--mount", "sh", "-c", mount, "sh"])
        .arg(store.root())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "store::tests::a_read_only_store_is_read_and_says_why_it_is_not_written"])
        .env(MARK, store.root())
        .output();
    match child {
        Ok(child) if child.status.success() => {}
        Ok(child) if matches!(child.status.code(), Some(1 | 77)) => {
            println!("SKIPPED: no mount namespace here: {}", String::from_utf8_lossy(&child.stderr));
        }
        Ok(child) => panic!("{}", String::from_utf8_lossy(&child.stdout)),
        Err(error) => println!("SKIPPED: no unshare here: {error}"),
    }
}

/// What loading would refuse is refused before it is copied, with the same reason.
#[test]
fn a_file_that_no_node_could_load_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let whole = SyntheticModel::default().gguf().bytes();
    // In the file a text's type (4 bytes) and length (8) stand between its key and it; a number's type before it.
    let with = |key: &str, skip: usize, new: &[u8]| {
        let mut bytes = whole.clone();
        let at = bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap();
        bytes[at + key.len() + skip..][..new.len()].copy_from_slice(new);
        bytes
    };
    for (bytes, word) in [
        (with("general.architecture", 12, b"mamba"), "mamba"),
        (with("llama.attention.head_count", 4, &[0; 4]), "head_count"),
        (with("tokenizer.ggml.model", 12, b"rwkv"), "rwkv"),
    ] {
        fs::write(&path, bytes).unwrap();
        let failure = Failure::from(store(&folder).add(&path, None, &mut go).unwrap_err());
        assert_eq!((failure.exit, failure.code.as_str()), (Exit::BadModel, "bad_model_file"));
        assert!(failure.message.contains(word), "{word}: {}", failure.message);
    }
    assert!(!folder.path().join("models").exists(), "nothing was made");
}
