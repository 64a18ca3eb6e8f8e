/* Functions of glibc that moved to another library or got a new version after 2.28, by their old
   versions, so that one wheel runs on all systems from glibc 2.28 on. x86-64 only.

   The linker binds a call to the newest version that the build machine has, and the module would
   not load on an older one. Each function here is hidden and jumps to the old version, which every
   later glibc keeps. A tail jump leaves arguments, stack and return address as they are. Functions
   that nothing calls are dropped with their section (--gc-sections). */

.macro from version, name
  .symver old_\name, \name@\version
  .section .text.\name, "ax", @progbits
  .globl \name
  .hidden \name
  .type \name, @function
\name:
  jmp *old_\name@GOTPCREL(%rip)
  .size \name, . - \name
.endm

/* int f(path or file, struct stat *): there was a function with a number in front, 1 here. */
.macro numbered name, old
  .symver old_\old, \old@GLIBC_2.2.5
  .section .text.\name, "ax", @progbits
  .globl \name
  .hidden \name
  .type \name, @function
\name:
  mov %rsi, %rdx
  mov %rdi, %rsi
  mov $1, %edi
  jmp *old_\old@GOTPCREL(%rip)
  .size \name, . - \name
.endm

.irp name, dladdr, dlclose, dlerror, dlopen, dlsym, dlvsym
  from GLIBC_2.2.5, \name
.endr
from GLIBC_2.3.4, dlmopen

.irp name, exp, log, pow
  from GLIBC_2.2.5, \name
.endr

.irp name, create, detach, join, kill, once, getspecific, setspecific, key_create, key_delete
  from GLIBC_2.2.5, pthread_\name
.endr
from GLIBC_2.2.5, __pthread_key_create
from GLIBC_2.2.5, pthread_mutex_trylock
from GLIBC_2.2.5, pthread_condattr_setpshared
.irp name, destroy, init, setpshared, settype
  from GLIBC_2.2.5, pthread_mutexattr_\name
.endr
.irp name, destroy, init, rdlock, timedrdlock, timedwrlock, tryrdlock, trywrlock, unlock, wrlock
  from GLIBC_2.2.5, pthread_rwlock_\name
.endr
.irp name, destroy, init, setpshared
  from GLIBC_2.2.5, pthread_rwlockattr_\name
.endr
.irp name, destroy, init, lock, trylock, unlock
  from GLIBC_2.2.5, pthread_spin_\name
.endr
.irp name, destroy, init, post, timedwait, trywait, wait
  from GLIBC_2.2.5, sem_\name
.endr
from GLIBC_2.2.5, shm_open
from GLIBC_2.2.5, shm_unlink

numbered stat, __xstat
numbered fstat, __fxstat
numbered lstat, __lxstat

/* Of libstdc++: whether there is one thread only, which makes counters cheaper. It may say no. */
  .section .bss.__libc_single_threaded, "aw", @nobits
  .globl __libc_single_threaded
  .hidden __libc_single_threaded
  .type __libc_single_threaded, @object
__libc_single_threaded:
  .zero 1
  .size __libc_single_threaded, 1

  .section .note.GNU-stack, "", @progbits
