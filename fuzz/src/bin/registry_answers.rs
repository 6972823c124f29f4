//! What a registry says: how it wants to be asked, where it redirects to, what an image consists of. And references, which
//! people and agents say. No input makes any of it panic, and what is accepted keeps the limits.
#![no_main]

use bathy_fuzz::Input;
use bathy_registry::Reference;
use bathy_registry::auth::challenge;
use bathy_registry::http::Url;
use bathy_registry::manifest::{Document, LayerKind, MAX_LAYERS, Manifest, Platform, media};
use libfuzzer_sys::fuzz_target;

const TYPES: [Option<&str>; 4] =
    [None, Some(media::OCI_INDEX), Some(media::DOCKER_MANIFEST), Some("text/plain; charset=utf-8")];
/// A manifest that is read, so that configs are.
const MANIFEST: &str = r#"{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":1,
"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},"layers":[{"size":1,
"mediaType":"application/vnd.oci.image.layer.v1.tar",
"digest":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}]}"#;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let (kind, content_type) = (input.u8(), input.choose(&TYPES));
    let bytes = input.take(usize::MAX);
    let text = String::from_utf8_lossy(bytes);
    match kind % 5 {
        0 => challenges(bytes),
        1 => reference(&text),
        2 => url(&text),
        3 => document(bytes, content_type),
        _ => config(bytes),
    }
});

fn challenges(bytes: &[u8]) {
    for challenge in challenge::parse(bytes).into_iter().flatten() {
        assert!(!challenge.scheme.is_empty() && challenge.parameters.len() <= 16);
        for (name, value) in &challenge.parameters {
            assert_eq!(challenge.parameter(name), Some(value.as_str()), "no name is there twice");
            assert!(value.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        }
    }
}

fn reference(text: &str) {
    let Ok(reference) = text.parse::<Reference>() else { return };
    let shown = reference.to_string();
    assert_eq!(shown.parse::<Reference>().as_ref(), Ok(&reference), "{shown}");
    assert!(reference.tag().is_some() || reference.digest().is_some());
    // What ends up in addresses and file names.
    assert!(shown.bytes().all(|byte| byte.is_ascii_graphic()) && !reference.repository().contains(".."));
}

fn url(text: &str) {
    let base = Url::parse("https://registry.example.com/v2/name/blobs/x").expect("it is an address");
    for url in [Url::parse(text), base.join(text)].into_iter().flatten() {
        assert!(url.target.starts_with('/') && url.origin.port != 0 && !url.origin.host.is_empty());
        assert!(!url.origin.authority().contains('@') && !url.target.contains('#'));
        let scheme = format!("{:?}", url.origin.scheme).to_lowercase();
        let again = Url::parse(&format!("{scheme}://{}{}", url.origin, url.target));
        assert!(again.as_ref() == Ok(&url), "{url:?} {again:?}");
    }
}

fn document(bytes: &[u8], content_type: Option<&str>) {
    match Document::parse(bytes, content_type) {
        Ok(Document::Manifest(manifest)) => {
            assert!((1..=MAX_LAYERS).contains(&manifest.layers.len()));
            for layer in &manifest.layers {
                assert!(layer.urls.is_empty());
                assert!(matches!(media::layer_kind(&layer.media_type), LayerKind::Tar(_)));
            }
            let _ = manifest.check_sizes(1 << 30, 1 << 40);
        }
        Ok(Document::Index(index)) => {
            if let Ok(chosen) = index.select(&Platform::default()) {
                assert_eq!(media::kind(&chosen.media_type), media::Kind::Manifest);
            }
        }
        Err(error) => assert!(!error.to_string().contains('\u{1b}')),
    }
}

fn config(bytes: &[u8]) {
    let document = Document::parse(MANIFEST.as_bytes(), None);
    let Ok(Document::Manifest(manifest)) = document else { unreachable!("it is a manifest") };
    let manifest: &Manifest = &manifest;
    match manifest.parse_config(bytes, &Platform::default()) {
        Ok(config) => assert_eq!(config.rootfs.diff_ids.len(), 1),
        Err(error) => assert!(!error.to_string().contains('\u{1b}')),
    }
}
