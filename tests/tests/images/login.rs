//! A registry that wants a user and a password.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use bathy_tests::finish;
use bathy_tests::kept::Home;

use crate::daemon::Daemon;
use crate::image::Image;
use crate::layer;

/// `user`, whose password is `secret`, as htpasswd writes it.
const USERS: &str = "user:$2y$05$dCqGHDJloJ48xFkA0JoTjO.PNVfxxpbFBJQ1Ta4rrSFxc9q9dNBzu\n";

#[test]
fn a_login_is_checked_kept_used_and_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let users = folder.path().join("users");
    fs::write(&users, USERS).unwrap();
    let auth = format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", users.display());
    let registry = Daemon::start(folder, "", &auth);
    let layout = registry.folder.path().join("layout");
    Image::new(vec![layer(|folder| crate::file(folder, "a", "b"))]).write_layout(&layout, "it");
    registry.fill(&layout, "it", "name:tag", &["--dest-creds", "user:secret"]);
    let reference = registry.reference("name:tag");

    let home = Home::new();
    let config = home.path().join("config");
    let bathy = |arguments: &[&str], input: &str| {
        let mut command = home.command(arguments);
        command.env("XDG_CONFIG_HOME", &config).env("DOCKER_CONFIG", home.path());
        finish(&mut command, input.as_bytes())
    };
    let pull = || bathy(&["pull", "--insecure", &reference], "");
    let login = ["login", "--insecure", "-u", "user", "--password-stdin", &registry.address];
    let anonymous = pull();
    assert!(anonymous.code == Some(125) && anonymous.stderr.contains("bathy login"), "{anonymous:?}");
    let wrong = bathy(&login, "wrong\n");
    assert!(wrong.code == Some(125) && wrong.stderr.contains("does not accept the login"), "{wrong:?}");
    assert!(!config.join("bathysphere/logins.json").exists());
    let right = bathy(&login, "secret\n");
    assert_eq!(right.code, Some(0), "{right:?}");
    let mode = config.join("bathysphere/logins.json").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(pull().code, Some(0));
    assert_eq!(bathy(&["logout", &registry.address], "").code, Some(0));
    assert_eq!(pull().code, Some(125), "the tag is asked for again");
    let without = bathy(&["login", "--password-stdin"], "x");
    assert!(without.stderr.contains("--username"), "{without:?}");
}
