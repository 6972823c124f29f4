//! Images made by hand.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use bathy_registry::Digest;
use bathy_registry::manifest::media;

/// An image whose layers are bytes of any kind: nothing here unpacks them.
#[derive(Clone)]
pub struct Image {
    pub layers: Vec<Vec<u8>>,
    pub config: Vec<u8>,
    pub manifest: Vec<u8>,
}

impl Image {
    pub fn new(layers: Vec<Vec<u8>>) -> Self {
        Self::of_architecture(layers, "amd64")
    }

    pub fn of_architecture(layers: Vec<Vec<u8>>, architecture: &str) -> Self {
        Self::with_config(layers, architecture, r#"{"Cmd":["/bin/true"],"Env":["A=b"]}"#)
    }

    /// `run` is the part of the config that says what to run.
    pub fn with_config(layers: Vec<Vec<u8>>, architecture: &str, run: &str) -> Self {
        // As if nothing were compressed.
        let diff_ids: Vec<String> = layers.iter().map(|layer| format!("\"{}\"", Digest::of(layer))).collect();
        let config = format!(
            r#"{{"architecture":"{architecture}","os":"linux","config":{run},
                "rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
            diff_ids.join(",")
        )
        .into_bytes();
        let entries: Vec<String> =
            layers.iter().map(|layer| descriptor("application/vnd.oci.image.layer.v1.tar", layer)).collect();
        let manifest = manifest(&descriptor(media::OCI_CONFIG, &config), &entries.join(","));
        Self { layers, config, manifest }
    }

    pub fn digest(&self) -> Digest {
        Digest::of(&self.manifest)
    }

    pub fn blobs(&self) -> BTreeMap<String, Vec<u8>> {
        let all = self.layers.iter().chain([&self.config]);
        all.map(|blob| (Digest::of(blob).to_string(), blob.clone())).collect()
    }

    /// As an OCI layout that skopeo reads, under a name.
    pub fn write_layout(&self, folder: &Path, name: &str) {
        write_blobs(folder, self);
        let reference = format!(r#","annotations":{{"org.opencontainers.image.ref.name":"{name}"}}}}"#);
        let entry = descriptor(media::OCI_MANIFEST, &self.manifest).replace('}', &reference);
        fs::write(folder.join("index.json"), index(&entry)).unwrap();
    }
}

fn write_blobs(folder: &Path, image: &Image) {
    fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    for blob in image.layers.iter().chain([&image.config, &image.manifest]) {
        fs::write(folder.join("blobs/sha256").join(Digest::of(blob).hex()), blob).unwrap();
    }
}

/// The same image for several architectures, as an OCI layout. Returns the digest of its index.
pub fn write_multi_arch(folder: &Path, name: &str, architectures: &[&str]) -> Digest {
    let entries: Vec<String> = architectures
        .iter()
        .map(|architecture| {
            let image = Image::of_architecture(vec![layer(architecture)], architecture);
            write_blobs(folder, &image);
            platform_entry(&image.manifest, architecture)
        })
        .collect();
    let inner = index(&entries.join(","));
    fs::write(folder.join("blobs/sha256").join(Digest::of(inner.as_bytes()).hex()), &inner).unwrap();
    let reference = format!(r#","annotations":{{"org.opencontainers.image.ref.name":"{name}"}}}}"#);
    let entry = descriptor(media::OCI_INDEX, inner.as_bytes()).replace('}', &reference);
    fs::write(folder.join("index.json"), index(&entry)).unwrap();
    Digest::of(inner.as_bytes())
}

pub fn platform_entry(manifest: &[u8], architecture: &str) -> String {
    let platform = format!(r#","platform":{{"os":"linux","architecture":"{architecture}"}}}}"#);
    descriptor(media::OCI_MANIFEST, manifest).replace('}', &platform)
}

pub fn descriptor(media_type: &str, content: &[u8]) -> String {
    format!(r#"{{"mediaType":"{media_type}","digest":"{}","size":{}}}"#, Digest::of(content), content.len())
}

pub fn manifest(config: &str, layers: &str) -> Vec<u8> {
    let media_type = media::OCI_MANIFEST;
    format!(r#"{{"schemaVersion":2,"mediaType":"{media_type}","config":{config},"layers":[{layers}]}}"#)
        .into_bytes()
}

pub fn index(entries: &str) -> String {
    format!(r#"{{"schemaVersion":2,"mediaType":"{}","manifests":[{entries}]}}"#, media::OCI_INDEX)
}

/// A tar archive with one file.
pub fn layer(content: &str) -> Vec<u8> {
    let mut header = [0_u8; 512];
    header[..8].copy_from_slice(b"some.txt");
    header[100..108].copy_from_slice(b"0000644\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124..136].copy_from_slice(format!("{:011o}\0", content.len()).as_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[148..156].fill(b' ');
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut archive = header.to_vec();
    archive.extend_from_slice(content.as_bytes());
    archive.resize(archive.len().next_multiple_of(512) + 1024, 0);
    archive
}

/// Bytes that no two layers share, and that do not repeat.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(88_172_645_463_325_252);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
