//! Looks up the user of a command: `name`, `uid`, `name:group` or `uid:gid`, in the image's own files.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// The most bytes of the image's files that are read: the guest can change them.
const MAX_FILE: u64 = 1024 * 1024;

/// A user in the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct User {
    /// The name, or the number if there is none.
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
    pub shell: String,
}

/// Looks `wanted` up in `/etc/passwd` and `/etc/group`.
pub fn find(wanted: &str) -> Result<User, String> {
    resolve(wanted, &read("/etc/passwd"), &read("/etc/group"))
}

/// The content of a file, or empty: an image need not have it.
fn read(path: &str) -> String {
    let mut bytes = Vec::new();
    // Does not block on a fifo in its place.
    if let Ok(file) = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        // What was read before an error is used all the same.
        let _ = file.take(MAX_FILE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn resolve(wanted: &str, passwd: &str, group: &str) -> Result<User, String> {
    let (name, wanted_group) = match wanted.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (wanted, None),
    };
    let entry = passwd
        .lines()
        .map(|line| line.split(':').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&name) || (is_number(name) && fields.get(2) == Some(&name)));
    let mut user = match entry.as_deref() {
        Some([name, _, uid, gid, _, home, shell, ..]) => User {
            name: (*name).to_owned(),
            uid: uid.parse().map_err(|_| format!("the image's entry of user {name} is damaged"))?,
            gid: gid.parse().map_err(|_| format!("the image's entry of user {name} is damaged"))?,
            groups: Vec::new(),
            home: (*home).to_owned(),
            shell: (*shell).to_owned(),
        },
        _ => match name.parse() {
            Ok(uid) => User {
                name: name.to_owned(),
                uid,
                gid: 0,
                groups: Vec::new(),
                home: "/".to_owned(),
                shell: "/bin/sh".to_owned(),
            },
            Err(_) => return Err(format!("the image has no user {name:?}")),
        },
    };
    if let Some(wanted_group) = wanted_group {
        user.gid = group_number(wanted_group, group)?;
        user.groups = vec![user.gid];
    } else {
        user.groups = member_of(&user.name, group);
        if !user.groups.contains(&user.gid) {
            user.groups.insert(0, user.gid);
        }
    }
    // System calls that change an identity take this number as "no change", which would be root.
    if user.uid == u32::MAX || user.gid == u32::MAX || user.groups.contains(&u32::MAX) {
        return Err(format!("{wanted:?} has an invalid number"));
    }
    Ok(user)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn group_number(wanted: &str, group: &str) -> Result<u32, String> {
    let entry =
        group.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|f| f.first() == Some(&wanted));
    match entry.as_deref() {
        Some([_, _, gid, ..]) => {
            gid.parse().map_err(|_| format!("the image's entry of group {wanted} is damaged"))
        }
        _ => wanted.parse().map_err(|_| format!("the image has no group {wanted:?}")),
    }
}

fn member_of(name: &str, group: &str) -> Vec<u32> {
    group
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let (gid, members) = (fields.nth(2)?, fields.next()?);
            members.split(',').any(|member| member == name).then(|| gid.parse().ok()).flatten()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1001::/home/user:/bin/bash\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:user,other\nuser:x:1001:\n";

    #[test]
    fn a_name_brings_its_groups_and_home() {
        let user = resolve("user", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.groups.as_slice()), (1000, 1001, &[1001, 27][..]));
        assert_eq!(user.home, "/home/user");
    }

    #[test]
    fn a_number_finds_its_name() {
        assert_eq!(resolve("1000", PASSWD, GROUP).unwrap().name, "user");
    }

    #[test]
    fn a_number_without_an_entry_is_allowed() {
        let user = resolve("4321:77", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_str()), (4321, 77, "/"));
    }

    #[test]
    fn a_group_can_be_named() {
        let user = resolve("user:sudo", PASSWD, GROUP).unwrap();
        assert_eq!((user.gid, user.groups.as_slice()), (27, &[27][..]));
    }

    #[test]
    fn the_number_that_would_stay_root_is_refused() {
        for wanted in ["4294967295", "4294967295:1", "1:4294967295", "trap", "member"] {
            let passwd = "trap:x:4294967295:1::/:/bin/sh\nmember:x:5:5::/:/bin/sh\n";
            let refused = resolve(wanted, passwd, "g:x:4294967295:member\n");
            assert!(refused.is_err(), "{wanted}");
        }
    }

    #[test]
    fn unknown_names_are_errors_that_say_so() {
        assert!(resolve("nobody-here", PASSWD, GROUP).unwrap_err().contains("nobody-here"));
        assert!(resolve("user:nogroup", PASSWD, GROUP).unwrap_err().contains("nogroup"));
        assert!(resolve("", PASSWD, GROUP).is_err());
    }
}
