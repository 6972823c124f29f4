use super::*;

const CONFIG: &str = r#"{"mediaType": "application/vnd.oci.image.config.v1+json", "size": 100,
    "digest": "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}"#;
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

fn layer(media_type: &str, number: usize, more: &str) -> String {
    format!(r#"{{"mediaType": "{media_type}", "size": 7, "digest": "sha256:{number:064x}"{more}}}"#)
}

fn manifest(layers: &[String]) -> String {
    let layers = layers.join(",");
    format!(
        r#"{{"schemaVersion": 2, "mediaType": "{}", "config": {CONFIG}, "layers": [{layers}]}}"#,
        media::OCI_MANIFEST
    )
}

fn parsed(text: &str) -> Result<Manifest, ManifestError> {
    match Document::parse(text.as_bytes(), None)? {
        Document::Manifest(manifest) => Ok(*manifest),
        Document::Index(index) => panic!("{index:?}"),
    }
}

fn entry(os: &str, architecture: &str, variant: &str, number: usize) -> String {
    let platform = format!(
        r#", "platform": {{"os": "{os}", "architecture": "{architecture}", "variant": "{variant}"}}"#
    );
    layer(media::OCI_MANIFEST, number, &platform)
}

fn index(entries: &[String]) -> Index {
    let text = format!(
        r#"{{"schemaVersion": 2, "mediaType": "{}", "manifests": [{}]}}"#,
        media::OCI_INDEX,
        entries.join(",")
    );
    match Document::parse(text.as_bytes(), Some(media::OCI_INDEX)).unwrap() {
        Document::Index(index) => index,
        Document::Manifest(manifest) => panic!("{manifest:?}"),
    }
}

fn config(architecture: &str, diff_ids: usize) -> String {
    let diff_ids: Vec<String> = (0..diff_ids).map(|number| format!("\"sha256:{number:064x}\"")).collect();
    format!(
        r#"{{"os": "linux", "architecture": "{architecture}", "config": {{"Cmd": null, "Env": ["A=b"], "User": "u",
            "ExposedPorts": {{"80/tcp": {{}}}}, "Labels": null, "WorkingDir": "/w", "StopSignal": "SIGINT"}},
            "rootfs": {{"type": "layers", "diff_ids": [{}]}}, "history": [{{"created_by": "x", "empty_layer": true}}]}}"#,
        diff_ids.join(",")
    )
}

#[test]
fn layers_of_both_families_are_known() {
    let types = [
        ("application/vnd.oci.image.layer.v1.tar", Compression::None),
        (GZIP, Compression::Gzip),
        ("application/vnd.oci.image.layer.v1.tar+zstd", Compression::Zstd),
        ("application/vnd.docker.image.rootfs.diff.tar", Compression::None),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", Compression::Gzip),
        ("application/vnd.docker.image.rootfs.diff.tar.zstd", Compression::Zstd),
    ];
    let layers: Vec<String> =
        types.iter().zip(0..).map(|(found, number)| layer(found.0, number, "")).collect();
    let read = parsed(&manifest(&layers)).unwrap();
    let found: Vec<_> = read.layers.iter().map(Descriptor::compression).collect();
    assert_eq!(found, types.map(|(_, compression)| Some(compression)));
    read.check_sizes(7, 42).unwrap();
    assert!(matches!(read.check_sizes(6, 42), Err(ManifestError::Large { what, .. }) if what == "layer 1"));
    assert!(matches!(read.check_sizes(7, 41), Err(ManifestError::Large { what, .. }) if what == "image"));
}

#[test]
fn what_is_not_in_the_registry_is_not_fetched() {
    let foreign = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
    for media_type in [foreign, "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"] {
        let error = parsed(&manifest(&[layer(GZIP, 0, ""), layer(media_type, 1, "")])).unwrap_err();
        assert!(matches!(error, ManifestError::Foreign(2, _)), "{error:?}");
    }
    let urls = r#", "urls": ["https://elsewhere.example.com/layer"]"#;
    let error = parsed(&manifest(&[layer(GZIP, 0, urls)])).unwrap_err();
    assert!(error.to_string().contains("elsewhere.example.com"), "{error}");
    parsed(&manifest(&[layer(GZIP, 0, r#", "urls": null"#)])).unwrap();
}

#[test]
fn the_number_of_layers_is_bounded() {
    let layers = |count| manifest(&(0..count).map(|number| layer(GZIP, number, "")).collect::<Vec<_>>());
    assert!(matches!(parsed(&layers(0)), Err(ManifestError::NoLayers)));
    assert_eq!(parsed(&layers(MAX_LAYERS)).unwrap().layers.len(), MAX_LAYERS);
    assert!(matches!(parsed(&layers(MAX_LAYERS + 1)), Err(ManifestError::Layers(129))));
    assert!(matches!(parsed(&layers(100_000)), Err(ManifestError::Large { .. })));
    let without = format!(r#"{{"schemaVersion": 2, "config": {CONFIG}}}"#);
    assert!(matches!(parsed(&without), Err(ManifestError::NoLayers)));
    let same = manifest(&[layer(GZIP, 0, ""), layer(GZIP, 0, "")]);
    assert_eq!(parsed(&same).unwrap().layers.len(), 2);
    assert!(matches!(parsed(&same.replacen(": 7", ": 8", 1)), Err(ManifestError::SizeConflict(_))));
}

#[test]
fn what_is_not_a_container_image_is_refused() {
    let one = manifest(&[layer(GZIP, 0, "")]);
    let chart = one.replace("oci.image.config.v1", "cncf.helm.config.v1");
    let error = parsed(&chart).unwrap_err().to_string();
    assert!(error.contains("not a container image") && error.contains("helm"), "{error}");
    let strange = one.replace("tar+gzip", "tar+lz4");
    assert!(matches!(parsed(&strange), Err(ManifestError::LayerType(1, _))));
    let digest = one.replace("sha256:00", "md5:00");
    assert!(matches!(parsed(&digest), Err(ManifestError::Json(..))));
    assert!(matches!(parsed(&one.replace(": 2", ": 3")), Err(ManifestError::Schema(3))));
    for text in ["", "[]", "{}", "null", r#"{"schemaVersion": -1}"#, &one.replace(": 7", ": -7")] {
        assert!(matches!(parsed(text), Err(ManifestError::Json(..))), "{text}");
    }
    let large = one.replace("\"size\": 100", "\"size\": 5000000");
    assert!(matches!(parsed(&large), Err(ManifestError::Large { what, .. }) if what == "config"));
    let quoted = one.replace(": 2", &format!(": \"{}\u{1b}\"", "x".repeat(1 << 20)));
    let error = parsed(&quoted).unwrap_err().to_string();
    assert!(error.len() < 1000 && !error.contains('\u{1b}'), "{error}");
    let nested = "[".repeat(100_000);
    assert!(matches!(parsed(&nested), Err(ManifestError::Json(..))));
}

#[test]
fn the_old_schema_is_refused_by_name() {
    let old = r#"{"schemaVersion": 1, "name": "x", "fsLayers": [], "history": []}"#;
    assert!(matches!(parsed(old), Err(ManifestError::Schema1)));
    assert!(matches!(parsed(&old.replace('1', "2")), Err(ManifestError::Schema1)));
    let signed = Some("application/vnd.docker.distribution.manifest.v1+prettyjws");
    assert!(matches!(Document::parse(b"{}", signed), Err(ManifestError::Schema1)));
}

#[test]
fn a_document_means_the_same_to_everybody() {
    let one = manifest(&[layer(GZIP, 0, "")]);
    let parse = |text: &str, content_type| Document::parse(text.as_bytes(), content_type);
    parse(&one, Some("application/vnd.oci.image.manifest.v1+json; charset=utf-8")).unwrap();
    parse(&one, Some("text/plain")).unwrap();
    let conflict = parse(&one, Some(media::DOCKER_MANIFEST));
    assert!(matches!(conflict, Err(ManifestError::TypeConflict { .. })), "{conflict:?}");
    assert!(parse(&one, Some(media::OCI_INDEX)).is_err());
    let both = one.replace("\"layers\"", "\"manifests\": [], \"layers\"");
    assert!(matches!(parse(&both, None), Err(ManifestError::Ambiguous)));
    let twice = one.replace("\"layers\"", "\"layers\": [], \"layers\"");
    let error = parse(&twice, None).unwrap_err();
    assert!(error.to_string().contains("duplicate"), "{error:?}");
    let typed = format!("\"mediaType\": \"{}\",", media::OCI_MANIFEST);
    let untyped = one.replace(&typed, "");
    assert_ne!(untyped, one);
    let Document::Manifest(read) = parse(&untyped, Some(media::DOCKER_MANIFEST)).unwrap() else { panic!() };
    assert_eq!(read.media_type, media::DOCKER_MANIFEST);
    parse(&untyped, None).unwrap();
    assert!(parse(&untyped, Some(media::OCI_INDEX)).is_err());
}

#[test]
fn the_platform_is_chosen_with_the_least_that_it_needs() {
    let here = Platform::default();
    let entries = [
        entry("unknown", "unknown", "", 0),
        entry("linux", "arm64", "v8", 1),
        entry("linux", "amd64", "v3", 2),
        entry("linux", "amd64", "v2", 3),
    ];
    let chosen = |index: &Index| index.select(&here).map(|found| found.digest.hex().chars().last());
    assert_eq!(chosen(&index(&entries)).unwrap(), Some('3'));
    let plain = entry("linux", "amd64", "", 4);
    assert_eq!(chosen(&index(&[entries[2].clone(), plain.clone()])).unwrap(), Some('4'));
    let error = chosen(&index(&entries[..2])).unwrap_err().to_string();
    assert_eq!(error, "It is not for linux/amd64. It exists for: linux/arm64/v8");
    assert!(chosen(&index(&[])).unwrap_err().to_string().ends_with("no platform at all"));
    let many: Vec<String> = (0..40).map(|number| entry("linux", &format!("a{number}"), "", number)).collect();
    assert!(chosen(&index(&many)).unwrap_err().to_string().ends_with("24 more"));
    let bare = layer(media::OCI_MANIFEST, 5, "");
    assert_eq!(chosen(&index(std::slice::from_ref(&bare))).unwrap(), Some('5'));
    assert!(chosen(&index(&[bare.clone(), bare])).is_err());
    let nested = plain.replace(media::OCI_MANIFEST, media::OCI_INDEX);
    assert!(matches!(chosen(&index(&[nested])), Err(ManifestError::NestedIndex)));
}

#[test]
fn the_config_fits_to_platform_and_layers() {
    let read = parsed(&manifest(&[layer(GZIP, 0, ""), layer(GZIP, 1, "")])).unwrap();
    let here = Platform::default();
    let parse = |text: &str| read.parse_config(text.as_bytes(), &here);
    let found = parse(&config("amd64", 2)).unwrap();
    assert_eq!((found.config.user.as_str(), found.config.cmd.len()), ("u", 0));
    assert_eq!(found.config.exposed_ports.keys().next().unwrap(), "80/tcp");
    assert_eq!(found.config.stop_signal, "SIGINT");
    assert!(found.history[0].empty_layer);
    let again = serde_json::to_string(&found).unwrap();
    assert_eq!(parse(&again).unwrap(), found);
    assert!(matches!(parse(&config("amd64", 1)), Err(ManifestError::DiffIds { layers: 2, named: 1 })));
    let error = parse(&config("arm64", 2)).unwrap_err().to_string();
    assert_eq!(error, "It is not for linux/amd64. It exists for: linux/arm64");
    parse(&config("amd64", 2).replace("\"Cmd\": null", "\"OnBuild\": []")).unwrap();
    assert!(matches!(parse("{}"), Err(ManifestError::Json("config", _))));
    let large = format!("{}{}", config("amd64", 2), " ".repeat(5 << 20));
    assert!(matches!(parse(&large), Err(ManifestError::Large { .. })));
}
