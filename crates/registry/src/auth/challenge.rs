//! `WWW-Authenticate`: how a registry wants to be asked (RFC 9110, section 11).

use thiserror::Error;

const MAX_LENGTH: usize = 8 << 10;
const MAX_CHALLENGES: usize = 8;
const MAX_PARAMETERS: usize = 16;

/// A header that is not a list of challenges.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ChallengeError {
    #[error("Its WWW-Authenticate header has more than {MAX_LENGTH} bytes")]
    Long,
    #[error("Its WWW-Authenticate header has too many parts")]
    Many,
    #[error("Its WWW-Authenticate header cannot be read at byte {0}")]
    Form(usize),
    #[error("Its WWW-Authenticate header has a parameter twice")]
    Twice,
}

/// One way to authenticate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// In lower case.
    pub scheme: String,
    /// Names in lower case.
    pub parameters: Vec<(String, String)>,
}

impl Challenge {
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// Parses one header's value.
pub fn parse(value: &[u8]) -> Result<Vec<Challenge>, ChallengeError> {
    if value.len() > MAX_LENGTH {
        return Err(ChallengeError::Long);
    }
    let mut reader = Reader { value, at: 0 };
    let mut challenges: Vec<Challenge> = Vec::new();
    reader.skip_separators();
    while !reader.is_at_end() {
        let name = reader.token()?;
        let spaces = reader.skip_spaces();
        match challenges.last_mut() {
            // `name=` goes on with the challenge before.
            Some(challenge) if reader.peek() == Some(b'=') && spaces == 0 => {
                reader.parameter(name, challenge)?;
            }
            _ => {
                challenges.push(reader.challenge(name, spaces)?);
                if challenges.len() > MAX_CHALLENGES {
                    return Err(ChallengeError::Many);
                }
            }
        }
        reader.skip_spaces();
        if !reader.is_at_end() && reader.peek() != Some(b',') {
            return Err(ChallengeError::Form(reader.at));
        }
        reader.skip_separators();
    }
    Ok(challenges)
}

struct Reader<'a> {
    value: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.value.get(self.at).copied()
    }

    fn is_at_end(&self) -> bool {
        self.at >= self.value.len()
    }

    fn skip_while(&mut self, matches: impl Fn(u8) -> bool) -> usize {
        let from = self.at;
        while self.peek().is_some_and(&matches) {
            self.at += 1;
        }
        self.at - from
    }

    fn skip_spaces(&mut self) -> usize {
        self.skip_while(|byte| matches!(byte, b' ' | b'\t'))
    }

    fn skip_separators(&mut self) {
        self.skip_while(|byte| matches!(byte, b' ' | b'\t' | b','));
    }

    fn text(&mut self, matches: impl Fn(u8) -> bool) -> Result<String, ChallengeError> {
        let from = self.at;
        if self.skip_while(matches) == 0 {
            return Err(ChallengeError::Form(from));
        }
        Ok(self.value[from..self.at].iter().copied().map(char::from).collect())
    }

    fn token(&mut self) -> Result<String, ChallengeError> {
        self.text(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    }

    /// Parses what follows the scheme: nothing, the first parameter, or data without a name, which is not supported.
    fn challenge(&mut self, scheme: String, spaces: usize) -> Result<Challenge, ChallengeError> {
        let mut challenge = Challenge { scheme: scheme.to_ascii_lowercase(), parameters: Vec::new() };
        if self.is_at_end() || self.peek() == Some(b',') {
            return Ok(challenge);
        }
        if spaces == 0 {
            return Err(ChallengeError::Form(self.at));
        }
        let from = self.at;
        let data = self.text(|byte| byte.is_ascii_alphanumeric() || b"-._~+/".contains(&byte));
        if data.is_ok() {
            self.skip_while(|byte| byte == b'=');
            let end = self.at;
            self.skip_spaces();
            if self.is_at_end() || self.peek() == Some(b',') {
                return Ok(challenge);
            }
            self.at = end;
        }
        self.at = from;
        let name = self.token()?;
        self.parameter(name, &mut challenge)?;
        Ok(challenge)
    }

    fn parameter(&mut self, name: String, challenge: &mut Challenge) -> Result<(), ChallengeError> {
        if self.peek() != Some(b'=') {
            return Err(ChallengeError::Form(self.at));
        }
        self.at += 1;
        let value = if self.peek() == Some(b'"') { self.quoted()? } else { self.token()? };
        let name = name.to_ascii_lowercase();
        if challenge.parameter(&name).is_some() {
            return Err(ChallengeError::Twice);
        }
        challenge.parameters.push((name, value));
        if challenge.parameters.len() > MAX_PARAMETERS {
            return Err(ChallengeError::Many);
        }
        Ok(())
    }

    fn quoted(&mut self) -> Result<String, ChallengeError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let byte = self.peek().ok_or(ChallengeError::Form(self.at))?;
            self.at += 1;
            match byte {
                b'"' => return Ok(text),
                b'\\' => {
                    let next = self.peek().filter(|next| matches!(next, b' '..=b'~'));
                    text.push(char::from(next.ok_or(ChallengeError::Form(self.at))?));
                    self.at += 1;
                }
                b' '..=b'~' => text.push(char::from(byte)),
                _ => return Err(ChallengeError::Form(self.at - 1)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Challenge> {
        parse(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn the_usual_challenges_are_read() {
        let hub = read(
            r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#,
        );
        assert_eq!((hub.len(), hub[0].scheme.as_str()), (1, "bearer"));
        assert_eq!(hub[0].parameter("realm"), Some("https://auth.docker.io/token"));
        assert_eq!(hub[0].parameter("scope"), Some("repository:a/b:pull,push"));
        assert_eq!(hub[0].parameter("error"), None);
        let basic = read("BASIC Realm=\"a \\\"b\\\"\" , charset=UTF-8");
        assert_eq!(basic[0].scheme, "basic");
        assert_eq!(basic[0].parameter("realm"), Some("a \"b\""));
        assert_eq!(basic[0].parameter("charset"), Some("UTF-8"));
    }

    #[test]
    fn several_in_one_header_are_told_apart() {
        let many = read("Negotiate, NTLM abc+/==, Bearer realm=\"x, y=z\", service=s,, Basic realm=r");
        let schemes: Vec<&str> = many.iter().map(|challenge| challenge.scheme.as_str()).collect();
        assert_eq!(schemes, ["negotiate", "ntlm", "bearer", "basic"]);
        assert_eq!(many[1].parameters, []);
        assert_eq!(many[2].parameter("realm"), Some("x, y=z"));
        assert_eq!(many[2].parameter("service"), Some("s"));
        assert_eq!(many[3].parameter("realm"), Some("r"));
        assert_eq!(read(""), []);
        assert_eq!(read(" , ,"), []);
    }

    #[test]
    fn what_is_not_a_challenge_is_refused() {
        for text in [
            "=",
            "\"x\"",
            "Bearer a=b=",
            "Bearer realm=\"x",
            "Bearer realm=\"x\\",
            "Bearer realm=\"x\"y=z",
            "Bearer realm=\"\u{e4}\"",
            "Bearer realm=\"a\nb\"",
            "Bearer realm=x service=y",
            "realm=\"x\"",
            "Bearer (",
            "Bearer \"x\"",
            "Bearer a b",
        ] {
            assert!(
                matches!(parse(text.as_bytes()), Err(ChallengeError::Form(_))),
                "{text:?}: {:?}",
                parse(text.as_bytes())
            );
        }
        assert_eq!(parse(b"Bearer realm=a, REALM=b"), Err(ChallengeError::Twice));
        assert_eq!(parse(&[b'a'; MAX_LENGTH + 1]), Err(ChallengeError::Long));
        assert_eq!(parse("a,".repeat(9).as_bytes()), Err(ChallengeError::Many));
        let many: String = (0..17).map(|n| format!("a{n}=b,")).collect();
        assert_eq!(parse(format!("Bearer {many}").as_bytes()), Err(ChallengeError::Many));
    }
}
