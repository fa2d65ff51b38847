// The library is the project itself, the app :sample. `gradle :assembleRelease` makes the AAR; docs/ANDROID.md.
pluginManagement {
    repositories {
        google()
        mavenCentral()
        gradlePluginPortal()
    }
    plugins {
        id("com.android.library") version "8.9.0"
        id("com.android.application") version "8.9.0"
        kotlin("android") version "2.1.20"
    }
}
dependencyResolutionManagement {
    repositories {
        google()
        mavenCentral()
    }
}
rootProject.name = "torch_pi2"
include(":sample")
