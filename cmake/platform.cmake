# Where this can be built, said before a compiler is looked for. With a toolchain file it is for another machine.
if((CMAKE_HOST_WIN32 OR CMAKE_HOST_APPLE) AND NOT CMAKE_TOOLCHAIN_FILE)
  if(CMAKE_HOST_WIN32)
    set(PI2_INSTEAD "Windows, which is not supported. Install it in WSL 2 (wsl --install).")
  else()
    set(PI2_INSTEAD "macOS, which is not supported. Install it in a Linux container or on a Linux machine.")
  endif()
  message(FATAL_ERROR "torch_pi2: expected Linux (x86_64 or aarch64), found ${PI2_INSTEAD}")
endif()
