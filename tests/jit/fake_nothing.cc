// A library without any function of NVRTC.
extern "C" int pantile_fake_nothing() {
  return 0;
}
