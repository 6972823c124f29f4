//! Media types of OCI and of Docker's second manifest version.

pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

/// What a registry is asked for.
pub const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// How a layer is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

/// What kind of document a media type stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Index,
    Manifest,
    /// Docker's first manifest version, which has no digests that could be checked.
    Schema1,
    Other,
}

pub fn kind(media_type: &str) -> Kind {
    match media_type {
        OCI_INDEX | DOCKER_LIST => Kind::Index,
        OCI_MANIFEST | DOCKER_MANIFEST => Kind::Manifest,
        _ if media_type.starts_with("application/vnd.docker.distribution.manifest.v1+") => Kind::Schema1,
        _ => Kind::Other,
    }
}

/// What a layer of this type is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    Tar(Compression),
    /// To be fetched from elsewhere than the registry.
    Foreign,
    Unknown,
}

pub fn layer_kind(media_type: &str) -> LayerKind {
    match media_type {
        "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => {
            LayerKind::Tar(Compression::None)
        }
        "application/vnd.oci.image.layer.v1.tar+gzip"
        | "application/vnd.docker.image.rootfs.diff.tar.gzip" => LayerKind::Tar(Compression::Gzip),
        "application/vnd.oci.image.layer.v1.tar+zstd"
        | "application/vnd.docker.image.rootfs.diff.tar.zstd" => LayerKind::Tar(Compression::Zstd),
        _ if media_type.starts_with("application/vnd.oci.image.layer.nondistributable.v1.tar")
            || media_type.starts_with("application/vnd.docker.image.rootfs.foreign.diff.tar") =>
        {
            LayerKind::Foreign
        }
        _ => LayerKind::Unknown,
    }
}
