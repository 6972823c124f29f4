_bathy() {
    local line value
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            compopt -o filenames
            while IFS= read -r value; do
                COMPREPLY+=("$value")
            done < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
            continue
        fi
        value=${line%%$'\t'*}
        [[ $value == *[:=] ]] && compopt -o nospace
        COMPREPLY+=("$value")
    done < <(command bathy complete "$COMP_CWORD" -- "${COMP_WORDS[@]}" 2>/dev/null)
}
complete -F _bathy bathy
