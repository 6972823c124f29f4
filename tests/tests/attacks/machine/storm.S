# A kernel that is hostile from its first instruction: entered by PVH, 32-bit, without paging. What it does is MODE:
#   0  two processors set devices up and take them down again, in and out of turn, with rings that ask for nothing
#   1  the same with any value anywhere, and rings of garbage
#   2  it spins, and says nothing
#   3  it stands still for ever
#   4  it fills the serial port
# SEED decides about everything that is left to chance.

	.equ DEVICES, 0xd0000000
	.equ DEVICE_SIZE, 0x1000
	.equ PLACES, 8
	# Memory that nothing else uses; zeros where nothing was written.
	.equ RINGS, 0x4000000
	.equ APIC, 0xfee00000
	.equ LOW, 0x8000

	.section .note.Xen, "a", @note
	.balign 4
	.long 4, 8, 18
	.asciz "Xen"
	.quad start

	.text
	.code32
	.globl start
start:
	cli
	movl $(stacks + 4096), %esp
.if MODE == 2
1:	jmp 1b
.elseif MODE == 3
1:	hlt
	jmp 1b
.elseif MODE == 4
	movw $0x3f8, %dx
	movb $'A', %al
1:	outb %al, %dx
	jmp 1b
.else
	# The second processor begins below the first megabyte, with 16 bits.
	cld
	movl $trampoline, %esi
	movl $LOW, %edi
	movl $(trampoline_end - trampoline), %ecx
	rep movsb
	movl $0x1ff, APIC + 0xf0
	movl $0xc4500, APIC + 0x300
	movl $1000000, %ecx
1:	loop 1b
	movl $(0xc4600 | LOW >> 12), APIC + 0x300
	movb $'F', %al
	call say
	movl $SEED, %esi
	xorl %ebp, %ebp
.if MODE == 1
	# Descriptors of anything, as many of them as a queue may have.
	xorl %ecx, %ecx
1:	call random
	andl $0x7ffffff, %eax
	movl %eax, RINGS(%ecx)
	call random
	andl $0x3f003f, %eax
	movl %eax, RINGS + 0x100000(%ecx)
	addl $4, %ecx
	cmpl $0x5000, %ecx
	jb 1b
.endif
	jmp storm

	.code16
trampoline:
	cli
	lgdtl %cs:(gdt_pointer - trampoline)
	movl %cr0, %eax
	orl $1, %eax
	movl %eax, %cr0
	ljmpl $8, $second
	.balign 8
gdt:
	.quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff
gdt_pointer:
	.word 23
	.long LOW + gdt - trampoline
trampoline_end:
	.code32
second:
	movw $16, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	movl $(stacks + 8192), %esp
	movb $'S', %al
	call say
	movl $(SEED ^ 0x5bd1e995), %esi
	xorl %ebp, %ebp

# One device after the other, its registers in %ebx, is set up as far as it comes.
storm:
	call random
	movl %eax, %ebx
	andl $(PLACES - 1), %ebx
	imull $DEVICE_SIZE, %ebx
	addl $DEVICES, %ebx
	movl $script, %edi
step:
	call random
	movl %eax, %edx
	andl $15, %edx
	jz disturb
	cmpl $4, %edx
	jb look
	movl 0(%edi), %ecx
	cmpl $-1, %ecx
	je done
	call random
	andl 8(%edi), %eax
	orl 4(%edi), %eax
	addl $12, %edi
	movl %eax, (%ebx, %ecx)
	jmp step

# The first time that a device is up is told.
done:
	cmpl $15, 0x70(%ebx)
	jne storm
	testl %ebp, %ebp
	jnz storm
	incl %ebp
	movb $'U', %al
	call say
	jmp storm

# Something at the wrong time.
disturb:
	call random
.if MODE == 0
	# The device is reset, or an interrupt acknowledged that there was not.
	movl $0x70, %ecx
	testl $1, %eax
	jz 1f
	movl $0x64, %ecx
1:	movl $0, (%ebx, %ecx)
.else
	movl %eax, %ecx
	andl $0x1fc, %ecx
	call random
	movl %eax, (%ebx, %ecx)
	# And more garbage in the rings.
	call random
	movl %eax, %ecx
	andl $0x103ffc, %ecx
	call random
	movl %eax, RINGS(%ecx)
.endif
	jmp step

# Reads of every width, also across the ends of registers.
look:
	call random
	movl %eax, %ecx
	shrl $8, %ecx
	andl $0x1ff, %ecx
	testl $1, %eax
	jz 1f
	movb (%ebx, %ecx), %al
	jmp step
1:	testl $2, %eax
	jz 1f
	movw (%ebx, %ecx), %ax
	jmp step
1:	movl (%ebx, %ecx), %eax
	jmp step

# A letter for the serial port: words of two processors would mix.
say:
	movw $0x3f8, %dx
	outb %al, %dx
	ret

# The next number of the processor's own sequence.
random:
	movl %esi, %eax
	shll $13, %eax
	xorl %eax, %esi
	movl %esi, %eax
	shrl $17, %eax
	xorl %eax, %esi
	movl %esi, %eax
	shll $5, %eax
	xorl %eax, %esi
	movl %esi, %eax
	ret

	.balign 4
# A register, a value, and which bits of it are left to chance.
script:
	.long 0x70, 0, 0
	.long 0x70, 1, 0
	.long 0x70, 3, 0
	.long 0x24, 1, 0
	.long 0x20, 1, 0
	.long 0x24, 0, 0
	.long 0x20, 0, 0
	.long 0x70, 11, 0
	.rept 3
	.long 0x30, 0, 3
	.long 0x38, 64, 0
	.long 0x80, RINGS, 0x3000
	.long 0x84, 0, 0
	.long 0x90, RINGS + 0x100000, 0x3000
	.long 0x94, 0, 0
	.long 0xa0, RINGS + 0x200000, 0x3000
	.long 0xa4, 0, 0
	.long 0x44, 1, 0
	.endr
	.long 0x70, 15, 0
	.rept 4
	.long 0x50, 0, 3
	.long 0x64, 0, 3
	.endr
	.long -1
.endif

	.bss
	.balign 16
stacks:
	.skip 8192
